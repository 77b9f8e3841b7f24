// The recursive skip over torch's tensors on a CPU, in pieces for torch's threads, with its derivative. operator.py has the
// schemas, rows.h the arithmetic. Computed in fp32; tensors of other types and strides are converted.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/native_layer_norm.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "rows.h"

namespace rskip {
namespace {

using at::Tensor;
using at::TensorList;
using Tensors = std::vector<Tensor>;
using Optional = std::optional<Tensor>;

// Elements of one piece of work: less is not worth waking a thread for. The parameters' gradients are summed piece by piece,
// in this order, and pieces depend on the shape alone: so the sums do not depend on threads.
constexpr int64_t kPiece = 32768, kMostPieces = 64;
constexpr int64_t kMostLanes = 16;  // of any instruction set: pieces are whole groups of rows
constexpr int64_t kWide = 512;  // features from which one row at a time leaves more of the first-level cache

// The operators' common arguments; operator.py has the schema.
struct Arguments {
  const Tensor &x, &f;
  TensorList gains, biases;
  const Optional &weights, &direction;
  double skip, branch, eps;
  bool rms;

  int64_t steps() const { return gains.size(); }
  int64_t dim() const { return x.dim() ? x.size(-1) : 0; }
};

// The rows of a tensor in fp32; none of a tensor that is not there.
struct Rows {
  float* first;
  int64_t dim;

  Rows(const Tensor& t, int64_t dim_) : first(t.defined() ? t.data_ptr<float>() : nullptr), dim(dim_) {}
  Vec* operator[](int64_t index) const { return reinterpret_cast<Vec*>(first + index * dim); }
};

Tensor in_fp32(const Tensor& t) { return t.to(at::kFloat).contiguous(); }

// The moments that torch's layer norm has for a row: an infinite or undefined variance gives the same values as torch.
Moments moments_by_torch(const float* row, int64_t dim, float eps) {
  const at::AutoDispatchBelowAutograd below;
  const Tensor z = at::from_blob(const_cast<float*>(row), {1, dim}, at::kFloat);
  const auto [y, mean, scale] = at::native_layer_norm(z, {dim}, std::nullopt, std::nullopt, eps);
  return {scale.item<float>(), mean.item<float>()};
}

// Refuses, with c10::Error, shapes for which the kernels would read memory that is not theirs.
void check(const Arguments& a) {
  const int64_t dim = a.dim(), steps = a.steps(), biases = a.biases.size();
  TORCH_CHECK(a.x.sizes() == a.f.sizes(), "skip_norm: x and f have shapes ", a.x.sizes(), " and ", a.f.sizes());
  TORCH_CHECK(dim > 0 && dim % 16 == 0, "skip_norm: rows of ", dim, " features: expected a multiple of 16");
  TORCH_CHECK(steps > 0, "skip_norm: expected a gain for each step, got none");
  TORCH_CHECK(biases == 0 || biases == steps, "skip_norm: ", biases, " biases for ", steps, " gains");

  const auto check_parameter = [dim](const Tensor& t) {
    TORCH_CHECK(t.dim() == 1 && t.size(0) == dim, "skip_norm: a parameter of ", t.sizes(), " for rows of ", dim);
  };
  for (const Tensor& gain : a.gains) check_parameter(gain);
  for (const Tensor& bias : a.biases) check_parameter(bias);
  if (a.direction) check_parameter(*a.direction);

  const int64_t expected = a.direction ? steps - 1 : steps;
  const bool fits = a.weights ? a.weights->dim() == 1 && a.weights->size(0) == expected : !a.direction;
  TORCH_CHECK(fits, "skip_mix: for ", steps, " steps expected ", expected, " weights");
}

// Validated arguments, converted to fp32, and their division into pieces.
struct Call : Problem {
  Tensor x, f, weights, direction;
  Tensors parameters;  // what `gains` and `biases` point to
  int64_t row_count, rows_per_piece, piece_count;

  explicit Call(const Arguments& a) : Problem(problem(a)), x(in_fp32(a.x)), f(in_fp32(a.f)) {
    for (const Tensor& gain : a.gains) gains.push_back(keep(in_fp32(gain)));
    for (const Tensor& bias : a.biases) biases.push_back(keep(in_fp32(bias)));
    if (biases.empty()) biases.assign(steps, keep(at::zeros({dim}, x.options())));
    if (a.weights) weights = in_fp32(*a.weights);
    if (a.direction) direction = in_fp32(*a.direction);

    row_count = x.numel() / dim;
    const int64_t most_pieces = std::clamp<int64_t>(x.numel() / kPiece, 1, kMostPieces);
    const int64_t groups = divide_up(row_count, kMostLanes);
    rows_per_piece = std::max<int64_t>(1, divide_up(groups, most_pieces)) * kMostLanes;
    piece_count = divide_up(row_count, rows_per_piece);
  }

  Tensor empty(at::IntArrayRef sizes) const { return at::empty(sizes, x.options()); }
  Rows rows_of(const Tensor& t) const { return Rows(t, dim); }

  // Calls work(group, its first row, piece) for groups of all rows: as many as still leave x, F and all that is kept of them in
  // the first-level cache. Short rows, of image maps, have their number of vectors compiled in.
  template <class F>
  void run(F work) const {
    switch (dim) {
      case 16: return run<16 / kLanes, kLanes>(work);
      case 32: return run<32 / kLanes, kLanes>(work);
      case 64: return run<64 / kLanes, kLanes>(work);
      default: return dim < kWide ? run<0, 2>(work) : run<0, 1>(work);
    }
  }

 private:
  static Problem problem(const Arguments& a) {
    check(a);
    return {a.dim(), a.steps(), float(a.skip), float(a.branch), float(a.eps), a.rms, {}, {}, moments_by_torch};
  }

  static int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

  const Vec* keep(const Tensor& parameter) { return rows_of(parameters.emplace_back(parameter))[0]; }

  template <int NV, int R, class F>
  void run(F work) const {
    at::parallel_for(0, piece_count, 1, [&](int64_t begin, int64_t end) {
      Group<NV, R> group(*this);
      for (int64_t piece = begin; piece < end; ++piece) {
        int64_t row = piece * rows_per_piece;
        const int64_t last = std::min(row + rows_per_piece, row_count);
        for (; row + R <= last; row += R) work(group, row, piece);
        if (row == last) continue;
        Group<NV, 1> one(*this);
        for (; row < last; ++row) work(one, row, piece);
      }
    });
  }
};

// y, and what backward needs: the moments, (2 steps, rows ...), or p, (steps, rows ...), where p differs from row to row.
std::tuple<Tensor, Tensor> recursive_skip(
    const Tensor& x, const Tensor& f, TensorList gains, TensorList biases, const Optional& weights,
    const Optional& direction, double skip, double branch, double eps, bool rms) {
  const Call call({x, f, gains, biases, weights, direction, skip, branch, eps, rms});
  const int64_t numbers = direction ? call.steps : weights ? 0 : 2 * call.steps;  // saved of each row
  std::vector<int64_t> shape = x.sizes().vec();
  shape.pop_back();
  shape.insert(shape.begin(), numbers);
  const Tensor y = call.empty(x.sizes()), saved = call.empty(shape);

  const Rows x_rows = call.rows_of(call.x), f_rows = call.rows_of(call.f), y_rows = call.rows_of(y);
  const float* const given_weights = call.rows_of(call.weights).first;
  const Vec* const direction_row = call.rows_of(call.direction)[0];
  float* const saved_numbers = call.rows_of(saved).first;
  call.run([&](auto& group, int64_t row, int64_t) {
    if (!weights) {
      group.forward(x_rows[row], f_rows[row], y_rows[row]);
      return group.save(group.moments, saved_numbers + row, numbers, call.row_count);
    }
    if (!direction) group.fill(group.weights, given_weights);
    group.mix(x_rows[row], f_rows[row], direction_row, given_weights, y_rows[row]);
    group.save(group.weights, saved_numbers + row, numbers, call.row_count);
  });
  return {y.to(x.scalar_type()), saved};
}

// The gradients of x, f, each gain, each bias, weights and direction, where these exist.
Tensors recursive_skip_backward(
    const Tensor& gradient, const Optional& d_saved, const Tensor& x, const Tensor& f, TensorList gains,
    TensorList biases, const Optional& weights, const Optional& direction, const Tensor& saved, double skip,
    double branch, double eps, bool rms) {
  const Call call({x, f, gains, biases, weights, direction, skip, branch, eps, rms});
  const int64_t dim = call.dim, steps = call.steps, count = call.row_count;
  const Tensor g = in_fp32(gradient), d_x = call.empty(x.sizes()), d_f = call.empty(x.sizes());
  const auto zeros = [&](at::IntArrayRef sizes) { return at::zeros(sizes, call.x.options()); };
  const Tensor d_weights = d_saved ? in_fp32(*d_saved).clone() : zeros({weights ? steps : 0, count});
  // of each piece the gradients of every step's gain and bias, and of the direction
  const int64_t vectors = 2 * steps + 1;
  const Tensor sums = zeros({std::max<int64_t>(1, call.piece_count), vectors, dim});

  const Rows x_rows = call.rows_of(call.x), f_rows = call.rows_of(call.f), g_rows = call.rows_of(g);
  const Rows d_x_rows = call.rows_of(d_x), d_f_rows = call.rows_of(d_f), sum_rows = call.rows_of(sums);
  const float* const given_weights = call.rows_of(call.weights).first;
  const Vec* const direction_row = call.rows_of(call.direction)[0];
  const float* const saved_numbers = call.rows_of(saved).first;
  float* const slopes = call.rows_of(d_weights).first;
  call.run([&](auto& group, int64_t row, int64_t piece) {
    Vec *const d_params = sum_rows[piece * vectors], *const d_direction = sum_rows[(piece + 1) * vectors - 1];
    if (!weights) {
      group.load(group.moments, saved_numbers + row, 2 * steps, count);
      return group.backward(x_rows[row], f_rows[row], g_rows[row], d_x_rows[row], d_f_rows[row], d_params);
    }
    if (direction) group.load(group.weights, saved_numbers + row, steps, count);
    else group.fill(group.weights, given_weights);
    group.load(group.slopes, slopes + row, steps, count);
    group.mix_backward(
        x_rows[row], f_rows[row], g_rows[row], direction_row, d_x_rows[row], d_f_rows[row], d_params, d_direction);
    group.save(group.slopes, slopes + row, steps, count);
  });

  float* const total = sum_rows.first;  // the first piece's, to which the others' are added in their order
  const int64_t width = vectors * dim;
  for (int64_t piece = 1; piece < call.piece_count; ++piece)
    for (int64_t j = 0; j < width; ++j) total[j] += total[piece * width + j];

  Tensors gradients{d_x.to(x.scalar_type()), d_f.to(f.scalar_type())};
  const auto push = [&](int64_t vector, const Tensor& like) {
    const Tensor one = call.empty({dim});
    memcpy(one.data_ptr(), total + vector * dim, dim * sizeof(float));
    gradients.push_back(one.to(like.scalar_type()));
  };
  for (int64_t k = 0; k < steps; ++k) push(2 * k, gains[k]);
  for (size_t k = 0; k < biases.size(); ++k) push(2 * k + 1, biases[k]);
  if (weights) {
    const Tensor sum = d_weights.reshape({steps, count}).sum(1).narrow(0, 0, weights->size(0));
    gradients.push_back(sum.to(weights->scalar_type(), /*non_blocking=*/false, /*copy=*/true));
  }
  if (direction) push(2 * steps, *direction);
  return gradients;
}

template <class Signature>
auto handle(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// The derivative. A node in Python, as for CUDA, would cost more than the norms of few rows.
struct RecursiveSkip : torch::autograd::Function<RecursiveSkip> {
  using Variables = torch::autograd::variable_list;
  using Context = torch::autograd::AutogradContext;

  static Variables forward(
      Context* context, const Tensor& x, const Tensor& f, TensorList gains, TensorList biases, const Optional& weights,
      const Optional& direction, double skip, double branch, double eps, bool rms) {
    at::AutoDispatchBelowADInplaceOrView below;
    static const auto op = handle<decltype(recursive_skip)>("fairseq_rskip::recursive_skip");
    const auto [y, saved] = op.call(x, f, gains, biases, weights, direction, skip, branch, eps, rms);
    Variables needed{x, f};
    needed.insert(needed.end(), gains.begin(), gains.end());
    needed.insert(needed.end(), biases.begin(), biases.end());
    needed.push_back(weights.value_or(Tensor()));
    needed.push_back(direction.value_or(Tensor()));
    needed.push_back(saved);
    context->save_for_backward(std::move(needed));
    context->saved_data["options"] =
        c10::List<double>({skip, branch, eps, double(rms), double(gains.size()), double(biases.size())});
    context->set_materialize_grads(false);
    if (!direction) context->mark_non_differentiable({saved});
    return {y, saved};
  }

  static Variables backward(Context* context, const Variables& gradients) {
    const auto options = context->saved_data["options"].toDoubleVector();
    const double skip = options[0], branch = options[1], eps = options[2];
    const bool rms = options[3] != 0;
    const size_t n_gains = options[4], n_biases = options[5];

    const Variables needed = context->get_saved_variables();
    const TensorList all(needed), gains = all.slice(2, n_gains), biases = all.slice(2 + n_gains, n_biases);
    const TensorList rest = all.slice(2 + n_gains + n_biases);
    const auto optional = [](const Tensor& t) { return t.defined() ? Optional(t) : std::nullopt; };
    const Optional weights = optional(rest[0]), direction = optional(rest[1]);
    const Tensor &x = all[0], &f = all[1], &saved = rest[2];

    const Tensor g = gradients[0].defined() ? gradients[0] : at::zeros_like(x);
    std::optional<at::AutoDispatchBelowADInplaceOrView> below;
    if (!at::GradMode::is_enabled()) below.emplace();  // otherwise operator.py's, which refuses
    static const auto op = handle<decltype(recursive_skip_backward)>("fairseq_rskip::recursive_skip_backward");
    Variables of_inputs = op.call(
        g, optional(gradients[1]), x, f, gains, biases, weights, direction, saved, skip, branch, eps, rms);
    of_inputs.resize(2 + n_gains + n_biases + 6);  // none of weights and direction not given, nor of the four options
    return of_inputs;
  }
};

std::tuple<Tensor, Tensor> recursive_skip_autograd(
    const Tensor& x, const Tensor& f, TensorList gains, TensorList biases, const Optional& weights,
    const Optional& direction, double skip, double branch, double eps, bool rms) {
  if (torch::autograd::compute_requires_grad(x, f, gains, biases, weights, direction)) {
    const auto results = RecursiveSkip::apply(x, f, gains, biases, weights, direction, skip, branch, eps, rms);
    return {results[0], results[1]};
  }
  at::AutoDispatchBelowADInplaceOrView below;  // generation: without the cost of a node
  static const auto op = handle<decltype(recursive_skip)>("fairseq_rskip::recursive_skip");
  return op.call(x, f, gains, biases, weights, direction, skip, branch, eps, rms);
}

}  // namespace

TORCH_LIBRARY_IMPL(fairseq_rskip, AutogradCPU, m) {
  m.impl("recursive_skip", recursive_skip_autograd);
}

TORCH_LIBRARY_IMPL(fairseq_rskip, CPU, m) {
  m.impl("recursive_skip", recursive_skip);
  m.impl("recursive_skip_backward", recursive_skip_backward);
}

}  // namespace rskip
