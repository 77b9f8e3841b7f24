"""The tasks by name. What differs between them is in their classes; a new one is an entry here."""

from .image_task import Images
from .text_tasks import LanguageModel, Translation

TASKS = {"images": Images(), "translation": Translation(), "language-model": LanguageModel()}
