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
constexpr int64_t kWide = 512;  // features from which one row at a time leaves more of the first-level cache

float* data(const Tensor& t) { return t.defined() ? t.data_ptr<float>() : nullptr; }

// The moments that torch's layer norm has for a row: an infinite or undefined variance gives the same values as torch.
Moments moments_by_torch(const float* row, int64_t dim, float eps) {
  const at::AutoDispatchBelowAutograd below;
  const Tensor z = at::from_blob(const_cast<float*>(row), {1, dim}, at::kFloat);
  const auto [y, mean, scale] = at::native_layer_norm(z, {dim}, std::nullopt, std::nullopt, eps);
  return {scale.item<float>(), mean.item<float>()};
}

// Validated arguments, converted to fp32.
struct Call : Problem {
  Tensor x, f, weights, direction;
  Tensors parameters;
  int64_t count, rows, pieces;  // rows in all, and of a piece

  Call(
      const Tensor& x_, const Tensor& f_, TensorList gains_, TensorList biases_, const Optional& weights_,
      const Optional& direction_, double skip, double branch, double eps, bool rms)
      : Problem{x_.dim() ? x_.size(-1) : 0, int64_t(gains_.size()), float(skip), float(branch), float(eps), rms, {}, {}, moments_by_torch} {
    TORCH_CHECK(x_.sizes() == f_.sizes(), "skip_norm: x and f have shapes ", x_.sizes(), " and ", f_.sizes());
    TORCH_CHECK(dim > 0 && dim % 16 == 0, "skip_norm: rows of ", dim, " features: expected a multiple of 16");
    TORCH_CHECK(steps > 0, "skip_norm: expected a gain for each step, got none");
    const int64_t biased = biases_.size(), p = steps - direction_.has_value();
    TORCH_CHECK(biased == 0 || biased == steps, "skip_norm: ", biased, " biases for ", steps, " gains");
    for (TensorList list : {gains_, biases_, direction_ ? TensorList(*direction_) : TensorList()})
      for (const Tensor& t : list)
        TORCH_CHECK(t.dim() == 1 && t.size(0) == dim, "skip_norm: a parameter of ", t.sizes(), " for rows of ", dim);
    TORCH_CHECK(
        weights_ ? weights_->dim() == 1 && weights_->size(0) == p : !direction_,
        "skip_mix: for ", steps, " steps expected ", p, " weights");
    count = x_.numel() / dim;
    const int64_t most = std::clamp<int64_t>(count * dim / kPiece, 1, kMostPieces);
    rows = std::max<int64_t>(1, (count + 16 * most - 1) / (16 * most)) * 16;  // of whole groups
    pieces = (count + rows - 1) / rows;
    x = ready(x_);
    f = ready(f_);
    for (const Tensor& t : gains_) gains.push_back(kept(ready(t)));
    for (const Tensor& t : biases_) biases.push_back(kept(ready(t)));
    if (biases.empty()) biases.assign(steps, kept(at::zeros({dim}, x.options())));
    if (weights_) weights = ready(*weights_);
    if (direction_) direction = ready(*direction_);
  }

  Tensor ready(const Tensor& t) const { return t.to(at::kFloat).contiguous(); }
  Tensor empty(at::IntArrayRef sizes) const { return at::empty(sizes, x.options()); }
  Vec* row(float* of, int64_t index = 0) const { return reinterpret_cast<Vec*>(of + index * dim); }
  const Vec* kept(const Tensor& t) { return row(data(parameters.emplace_back(t))); }

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
  template <int NV, int R, class F>
  void run(F work) const {
    at::parallel_for(0, pieces, 1, [&](int64_t begin, int64_t end) {
      Group<NV, R> group(*this);
      for (int64_t piece = begin; piece < end; ++piece) {
        int64_t row = piece * rows;
        const int64_t last = std::min(row + rows, count);
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
  const Call call(x, f, gains, biases, weights, direction, skip, branch, eps, rms);
  const int64_t numbers = direction ? call.steps : weights ? 0 : 2 * call.steps;
  std::vector<int64_t> shape = x.sizes().vec();
  shape.pop_back();
  shape.insert(shape.begin(), numbers);
  const Tensor y = call.empty(x.sizes()), saved = call.empty(shape);
  float *const xs = data(call.x), *const fs = data(call.f), *const ys = data(y), *const to = data(saved);
  const float* const given = data(call.weights);
  const Vec* const along = call.row(data(call.direction));
  call.run([&](auto& group, int64_t row, int64_t) {
    Vec *const a = call.row(xs, row), *const b = call.row(fs, row), *const out = call.row(ys, row);
    if (weights && !direction) group.fill(group.weights, given);
    if (weights) group.mix(a, b, along, given, out);
    else group.forward(a, b, out);
    group.save(weights ? group.weights : group.moments, to + row, numbers, call.count);
  });
  return {y.to(x.scalar_type()), saved};
}

// The gradients of x, f, each gain, each bias, weights and direction, where these exist.
Tensors recursive_skip_backward(
    const Tensor& gradient, const Optional& d_saved, const Tensor& x, const Tensor& f, TensorList gains,
    TensorList biases, const Optional& weights, const Optional& direction, const Tensor& saved, double skip,
    double branch, double eps, bool rms) {
  const Call call(x, f, gains, biases, weights, direction, skip, branch, eps, rms);
  const int64_t dim = call.dim, steps = call.steps, count = call.count, vectors = 2 * steps + 1;
  const Tensor g = call.ready(gradient), d_x = call.empty(x.sizes()), d_f = call.empty(x.sizes());
  const Tensor sums = at::zeros({std::max<int64_t>(1, call.pieces), vectors, dim}, call.x.options());
  const Tensor to_p = d_saved ? call.ready(*d_saved).clone() : at::zeros({weights ? steps : 0, count}, call.x.options());
  float *const xs = data(call.x), *const fs = data(call.f), *const gs = data(g), *const dxs = data(d_x);
  float *const dfs = data(d_f), *const first = data(sums), *const from = data(saved), *const slopes = data(to_p);
  const float* const given = data(call.weights);
  const Vec* const along = call.row(data(call.direction));
  call.run([&](auto& group, int64_t row, int64_t piece) {
    Vec *const a = call.row(xs, row), *const b = call.row(fs, row), *const c = call.row(gs, row);
    Vec *const d_a = call.row(dxs, row), *const d_b = call.row(dfs, row), *const d = call.row(first, piece * vectors);
    if (!weights) {
      group.load(group.moments, from + row, 2 * steps, count);
      return group.backward(a, b, c, d_a, d_b, d);
    }
    if (direction) group.load(group.weights, from + row, steps, count);
    else group.fill(group.weights, given);
    group.load(group.slopes, slopes + row, steps, count);
    group.mix_backward(a, b, c, along, d_a, d_b, d, call.row(first, (piece + 1) * vectors - 1));
    group.save(group.slopes, slopes + row, steps, count);
  });
  const int64_t width = vectors * dim;  // the pieces' sums, added up in their order
  for (int64_t i = width; i < sums.numel(); i += width)
    for (int64_t j = 0; j < width; ++j) first[j] += first[i + j];
  Tensors results{d_x.to(x.scalar_type()), d_f.to(f.scalar_type())};
  const auto push = [&](int64_t vector, const Tensor& like) {
    const Tensor one = call.empty({dim});
    memcpy(one.data_ptr(), first + vector * dim, dim * sizeof(float));
    results.push_back(one.to(like.scalar_type()));
  };
  for (int64_t k = 0; k < steps; ++k) push(2 * k, gains[k]);
  for (size_t k = 0; k < biases.size(); ++k) push(2 * k + 1, biases[k]);
  if (weights) {
    const Tensor sum = to_p.reshape({steps, count}).sum(1).narrow(0, 0, weights->size(0));
    results.push_back(sum.to(weights->scalar_type(), false, true));
  }
  if (direction) push(2 * steps, *direction);
  return results;
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
    for (TensorList list : {gains, biases}) needed.insert(needed.end(), list.begin(), list.end());
    for (const Optional& t : {weights, direction}) needed.push_back(t.value_or(Tensor()));
    needed.push_back(saved);
    context->save_for_backward(std::move(needed));
    context->saved_data["options"] = c10::List<double>({skip, branch, eps, double(rms), double(gains.size())});
    context->set_materialize_grads(false);
    if (!direction) context->mark_non_differentiable({saved});
    return {y, saved};
  }

  static Variables backward(Context* context, const Variables& gradients) {
    const Variables needed = context->get_saved_variables();
    const auto o = context->saved_data["options"].toDoubleVector();
    const size_t steps = o[4], last = needed.size() - 1;
    const TensorList all(needed), gains = all.slice(2, steps), biases = all.slice(2 + steps, last - 4 - steps);
    const auto optional = [](const Tensor& t) { return t.defined() ? Optional(t) : std::nullopt; };
    const Tensor g = gradients[0].defined() ? gradients[0] : at::zeros_like(all[0]);
    std::optional<at::AutoDispatchBelowADInplaceOrView> below;
    if (!at::GradMode::is_enabled()) below.emplace();  // otherwise operator.py's, which refuses
    static const auto op = handle<decltype(recursive_skip_backward)>("fairseq_rskip::recursive_skip_backward");
    Variables found = op.call(
        g, optional(gradients[1]), all[0], all[1], gains, biases, optional(all[last - 2]), optional(all[last - 1]),
        all[last], o[0], o[1], o[2], o[3] != 0);
    found.resize(last + 4);
    return found;
  }
};

std::tuple<Tensor, Tensor> recursive_skip_autograd(
    const Tensor& x, const Tensor& f, TensorList gains, TensorList biases, const Optional& weights,
    const Optional& direction, double skip, double branch, double eps, bool rms) {
  if (torch::autograd::compute_requires_grad(x, f, gains, biases, weights, direction)) {
    const auto found = RecursiveSkip::apply(x, f, gains, biases, weights, direction, skip, branch, eps, rms);
    return {found[0], found[1]};
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
