"""The paper's tables from one's own runs: experiments/*.yaml, the runs they ask for, their state and their results."""
