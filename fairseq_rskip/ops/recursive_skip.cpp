// The operators of fairseq_rskip on a CPU over torch's tensors, in pieces for torch's threads, and skip_norm's derivative.
// dispatch.py and mix.py have their schemas and skip_mix's derivative, rows.h the arithmetic. Computed in fp32; tensors of
// other types and strides are converted.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
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

// The memory of a contiguous tensor, without torch's checks at each use; of none, null.
struct Matrix {
  char* data = nullptr;
  int64_t rows = 0, bytes = 0;  // of a row

  Matrix(const Tensor& t, int64_t width) {
    if (!t.defined()) return;
    data = static_cast<char*>(t.data_ptr());
    bytes = width * t.element_size();
    rows = width ? t.numel() / width : 0;
  }
};

// A group of rows, with what tensors hold of them.
template <int NV, int R>
struct Rows : Group<NV, R> {
  using Group<NV, R>::Group;

  static Vec* row(const Matrix& m, int64_t index = 0) { return reinterpret_cast<Vec*>(m.data + index * m.bytes); }

  // The numbers of these rows, a vector for each row of `m`, which has a column for each row of x.
  void load(Vec* to, const Matrix& m, int64_t first) const {
    for (int64_t k = 0; k < m.rows; ++k) memcpy(to + k, reinterpret_cast<float*>(row(m, k)) + first, R * sizeof(float));
  }
  void save(const Vec* from, const Matrix& m, int64_t first) const {
    for (int64_t k = 0; k < m.rows; ++k) memcpy(reinterpret_cast<float*>(row(m, k)) + first, from + k, R * sizeof(float));
  }
  // The same number for all rows.
  void fill(Vec* to, const Matrix& m) const {
    for (int64_t k = 0; k < m.rows; ++k) to[k] = Vec{} + *reinterpret_cast<float*>(row(m, k));
  }
};

// What an operator is called with, checked, in the type of computing.
struct Call {
  Tensor x, f;
  Tensors gains, biases;
  double skip, branch, eps;
  bool rms;
  int64_t dim, steps, count;

  Call(
      const Tensor& x_, const Tensor& f_, TensorList gains_, TensorList biases_, double skip, double branch, double eps,
      bool rms)
      : skip(skip), branch(branch), eps(eps), rms(rms), dim(x_.dim() ? x_.size(-1) : 0), steps(gains_.size()) {
    TORCH_CHECK(x_.sizes() == f_.sizes(), "skip_norm: x and f have shapes ", x_.sizes(), " and ", f_.sizes());
    TORCH_CHECK(dim > 0 && dim % 16 == 0, "skip_norm: rows of ", dim, " features: expected a multiple of 16");
    TORCH_CHECK(steps > 0, "skip_norm: expected a gain for each step, got none");
    TORCH_CHECK(
        biases_.empty() || biases_.size() == gains_.size(), "skip_norm: ", biases_.size(), " biases for ", steps,
        " gains");
    count = x_.numel() / dim;
    for (TensorList list : {gains_, biases_})
      for (const Tensor& t : list)
        TORCH_CHECK(t.dim() == 1 && t.size(0) == dim, "skip_norm: a gain or bias of ", t.sizes(), " for rows of ", dim);
    x = ready(x_);
    f = ready(f_);
    for (const Tensor& t : gains_) gains.push_back(ready(t));
    for (const Tensor& t : biases_) biases.push_back(ready(t));
    if (biases.empty()) biases.assign(steps, at::zeros({dim}, x.options()));
  }

  Tensor ready(const Tensor& t) const { return t.to(at::kFloat).contiguous(); }
  Tensor ready(const Optional& t) const { return t ? ready(*t) : Tensor(); }
  Tensor empty(at::IntArrayRef sizes) const { return at::empty(sizes, x.options()); }

  // Calls work(group, its first row, piece) for groups of all rows: as many as still leave x, F and all that is kept of them in
  // the first-level cache. Short rows, of image maps, have their number of vectors compiled in.
  template <class F>
  void run(F work) const {
    switch (dim) {
      case 16: return run<16 / kLanes, kLanes>(work);
      case 32: return run<32 / kLanes, kLanes>(work);
      case 64: return run<64 / kLanes, std::min(8, kLanes)>(work);
      default: return dim < kWide ? run<0, 2>(work) : run<0, 1>(work);
    }
  }

  int64_t rows_of_piece() const {
    const int64_t most = std::clamp<int64_t>(count * dim / kPiece, 1, kMostPieces);
    return std::max<int64_t>(1, (count + 16 * most - 1) / (16 * most)) * 16;  // of whole groups
  }
  // zeros for what each piece sums: so many vectors of features
  Tensor sums(int64_t rows) const { return at::zeros({std::max<int64_t>(1, pieces()), rows, dim}, x.options()); }
  int64_t pieces() const { return (count + rows_of_piece() - 1) / rows_of_piece(); }

 private:
  template <int NV, int R, class F>
  void run(F work) const {
    Problem p{dim, steps, float(skip), float(branch), float(eps), rms, {}, {}};
    for (const Tensor& t : gains) p.gains.push_back(Rows<NV, R>::row({t, dim}));
    for (const Tensor& t : biases) p.biases.push_back(Rows<NV, R>::row({t, dim}));
    const int64_t rows = rows_of_piece();
    at::parallel_for(0, pieces(), 1, [&](int64_t begin, int64_t end) {
      Rows<NV, R> group(p);
      for (int64_t piece = begin; piece < end; ++piece) {
        int64_t row = piece * rows;
        const int64_t last = std::min(row + rows, count);
        for (; row + R <= last; row += R) work(group, row, piece);
        if (row == last) continue;
        Rows<NV, 1> one(p);
        for (; row < last; ++row) work(one, row, piece);
      }
    });
  }
};

// y, and the moments, (2 steps, rows), where they are wanted.
std::tuple<Tensor, Tensor> forward(const Call& call, at::ScalarType type, bool keep) {
  const Tensor y = call.empty(call.x.sizes()), moments = call.empty({keep ? 2 * call.steps : 0, call.count});
  const Matrix xs(call.x, call.dim), fs(call.f, call.dim), ys(y, call.dim), kept(moments, call.count);
  call.run([&](auto& group, int64_t row, int64_t) {
    group.forward(group.row(xs, row), group.row(fs, row), group.row(ys, row));
    group.save(group.moments(), kept, row);
  });
  return {y.to(type), moments};
}

Tensor skip_norm(
    const Tensor& x, const Tensor& f, TensorList gains, TensorList biases, double skip, double branch, double eps,
    bool rms) {
  return std::get<0>(forward(Call(x, f, gains, biases, skip, branch, eps, rms), x.scalar_type(), false));
}

std::tuple<Tensor, Tensor> skip_norm_moments(
    const Tensor& x, const Tensor& f, TensorList gains, TensorList biases, double skip, double branch, double eps,
    bool rms) {
  return forward(Call(x, f, gains, biases, skip, branch, eps, rms), x.scalar_type(), true);
}

// Appends the rows of `sums`, (pieces, rows, dim), that belong to gains and biases, a step's side by side, added up in the
// order of the pieces.
void append(Tensors& results, const Tensor& sums, TensorList gains, TensorList biases) {
  float* const first = sums.data_ptr<float>();
  const int64_t dim = sums.size(2), width = sums.size(1) * dim;
  for (int64_t i = width; i < sums.numel(); i += width)
    for (int64_t j = 0; j < width; ++j) first[j] += first[i + j];
  const auto push = [&](int64_t row, at::ScalarType type) {
    const Tensor one = at::empty({dim}, sums.options());
    memcpy(one.data_ptr(), first + row * dim, dim * sizeof(float));
    results.push_back(one.to(type));
  };
  for (size_t k = 0; k < gains.size(); ++k) push(2 * k, gains[k].scalar_type());
  for (size_t k = 0; k < biases.size(); ++k) push(2 * k + 1, biases[k].scalar_type());
}

// The gradients of x, f, each gain, each bias.
Tensors skip_norm_backward(
    const Tensor& gradient, const Tensor& x, const Tensor& f, TensorList gains, TensorList biases,
    const Tensor& moments, double skip, double branch, double eps, bool rms) {
  const Call call(x, f, gains, biases, skip, branch, eps, rms);
  const Tensor g = call.ready(gradient), d_x = call.empty(x.sizes()), d_f = call.empty(x.sizes());
  const Tensor sums = call.sums(2 * call.steps);
  const Matrix xs(call.x, call.dim), fs(call.f, call.dim), gs(g, call.dim), kept(moments, call.count);
  const Matrix dxs(d_x, call.dim), dfs(d_f, call.dim), params(sums, sums.size(1) * call.dim);
  call.run([&](auto& group, int64_t row, int64_t piece) {
    group.load(group.moments(), kept, row);
    group.backward(
        group.row(xs, row), group.row(fs, row), group.row(gs, row), group.row(dxs, row), group.row(dfs, row),
        group.row(params, piece));
  });
  Tensors results{d_x.to(x.scalar_type()), d_f.to(f.scalar_type())};
  append(results, sums, gains, biases);
  return results;
}

// sum_k p_k y_k, and with a direction also p, (steps, rows ...), in the type of computing.
std::tuple<Tensor, Tensor> skip_mix(
    const Tensor& x, const Tensor& f, TensorList gains, TensorList biases, const Tensor& weights,
    const Optional& direction, double skip, double branch, double eps, bool rms) {
  const Call call(x, f, gains, biases, skip, branch, eps, rms);
  TORCH_CHECK(
      weights.dim() == 1 && weights.size(0) == call.steps - direction.has_value(), "skip_mix: weights of shape ",
      weights.sizes(), " for ", call.steps, " steps: expected ", call.steps - direction.has_value());
  TORCH_CHECK(
      !direction || (direction->dim() == 1 && direction->size(0) == call.dim), "skip_mix: a direction for rows of ",
      call.dim, " expected");
  const Tensor given = call.ready(weights), along = call.ready(direction), y = call.empty(x.sizes());
  std::vector<int64_t> shape = x.sizes().vec();
  shape.pop_back();
  shape.insert(shape.begin(), call.steps);
  const Tensor p = direction ? call.empty(shape) : call.empty({0});
  const Matrix xs(call.x, call.dim), fs(call.f, call.dim), ys(y, call.dim), halts(given, 1);
  const Matrix us(along, call.dim), ps(p, direction ? call.count : 0);
  call.run([&](auto& group, int64_t row, int64_t) {
    if (!direction) group.fill(group.weights(0), halts);
    group.mix(group.row(xs, row), group.row(fs, row), group.row(us), group.row(halts), group.row(ys, row));
    group.save(group.weights(0), ps, row);
  });
  return {y.to(x.scalar_type()), p};
}

// The gradients of x, f, weights, direction (where there is one), gains and biases. p: the weights, or with a direction
// what skip_mix returned, whose own gradient is d_p.
Tensors skip_mix_backward(
    const Tensor& gradient, const Optional& d_p, const Tensor& x, const Tensor& f, TensorList gains, TensorList biases,
    const Tensor& p, const Optional& direction, double skip, double branch, double eps, bool rms) {
  const Call call(x, f, gains, biases, skip, branch, eps, rms);
  const Tensor g = call.ready(gradient), d_x = call.empty(x.sizes()), d_f = call.empty(x.sizes());
  const Tensor sums = call.sums(2 * call.steps + 1), given = call.ready(p), along = call.ready(direction);
  const Tensor slopes = d_p ? call.ready(*d_p).clone() : at::zeros({call.steps, call.count}, given.options());
  const Matrix xs(call.x, call.dim), fs(call.f, call.dim), gs(g, call.dim), us(along, call.dim);
  const Matrix dxs(d_x, call.dim), dfs(d_f, call.dim), params(sums, sums.size(1) * call.dim);
  const Matrix ps(given, direction ? call.count : 1), to_p(slopes, call.count);
  call.run([&](auto& group, int64_t row, int64_t piece) {
    auto* const d_params = group.row(params, piece);
    if (direction) group.load(group.weights(0), ps, row);
    else group.fill(group.weights(0), ps);
    group.load(group.slopes(0), to_p, row);
    group.mix_backward(
        group.row(xs, row), group.row(fs, row), group.row(gs, row), group.row(us), group.row(dxs, row),
        group.row(dfs, row), d_params, d_params + 2 * call.steps * call.dim / kLanes);
    group.save(group.slopes(0), to_p, row);
  });
  const Tensor d_weights = slopes.reshape({call.steps, call.count}).sum(1);
  Tensors results{d_x.to(x.scalar_type()), d_f.to(f.scalar_type()), d_weights.narrow(0, 0, call.steps - direction.has_value()).clone()};
  append(results, sums, gains, biases);
  if (direction) results.insert(results.begin() + 3, sums[0][2 * call.steps].to(direction->scalar_type(), false, true));
  return results;
}

template <class Signature>
auto handle(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// skip_norm's derivative: it keeps x, F and the moments. A node in Python would cost more than the norms of few rows.
struct SkipNorm : torch::autograd::Function<SkipNorm> {
  using Variables = torch::autograd::variable_list;
  using Context = torch::autograd::AutogradContext;

  static Tensor forward(
      Context* context, const Tensor& x, const Tensor& f, TensorList gains, TensorList biases, double skip,
      double branch, double eps, bool rms) {
    at::AutoDispatchBelowADInplaceOrView below;
    static const auto op = handle<decltype(skip_norm_moments)>("fairseq_rskip::skip_norm_moments");
    const auto [y, moments] = op.call(x, f, gains, biases, skip, branch, eps, rms);
    Variables saved{x, f};
    for (TensorList list : {gains, biases}) saved.insert(saved.end(), list.begin(), list.end());
    saved.push_back(moments);
    context->save_for_backward(std::move(saved));
    context->saved_data["options"] = c10::List<double>({skip, branch, eps, double(rms), double(gains.size())});
    return y;
  }

  static Variables backward(Context* context, const Variables& gradients) {
    Variables saved = context->get_saved_variables(), found;
    const Tensor moments = saved.back();
    saved.pop_back();
    const auto o = context->saved_data["options"].toDoubleVector();
    const size_t steps = o[4];
    if (at::GradMode::is_enabled()) {  // for a second derivative: the reference's
      for (Tensor& t : saved) t = t.view_as(t);  // a tensor may have two places
      const TensorList all(saved);
      static const auto op = handle<decltype(skip_norm)>("fairseq_rskip::skip_norm_reference");
      const Tensor y = op.call(all[0], all[1], all.slice(2, steps), all.slice(2 + steps), o[0], o[1], o[2], o[3] != 0);
      Variables wanted;
      for (size_t i = 0; i < saved.size(); ++i)
        if (context->needs_input_grad(i)) wanted.push_back(saved[i]);
      const Variables some = torch::autograd::grad({y}, wanted, gradients, true, true);
      for (size_t i = 0, next = 0; i < saved.size(); ++i)
        found.push_back(context->needs_input_grad(i) ? some[next++] : Tensor());
    } else {
      at::AutoDispatchBelowADInplaceOrView below;
      const TensorList all(saved), gains = all.slice(2, steps), biases = all.slice(2 + steps);
      static const auto op = handle<decltype(skip_norm_backward)>("fairseq_rskip::skip_norm_moments_backward");
      found = op.call(gradients[0], all[0], all[1], gains, biases, moments, o[0], o[1], o[2], o[3] != 0);
    }
    found.resize(saved.size() + 4);
    return found;
  }
};

Tensor skip_norm_autograd(
    const Tensor& x, const Tensor& f, TensorList gains, TensorList biases, double skip, double branch, double eps,
    bool rms) {
  bool differentiable = x.requires_grad() || f.requires_grad();
  for (TensorList list : {gains, biases})
    for (const Tensor& parameter : list) differentiable = differentiable || parameter.requires_grad();
  if (differentiable && at::GradMode::is_enabled())
    return SkipNorm::apply(x, f, gains, biases, skip, branch, eps, rms);
  at::AutoDispatchBelowADInplaceOrView below;  // generation: without the cost of a node
  static const auto op = handle<decltype(skip_norm)>("fairseq_rskip::skip_norm");
  return op.call(x, f, gains, biases, skip, branch, eps, rms);
}

}  // namespace

TORCH_LIBRARY_IMPL(fairseq_rskip, AutogradCPU, m) {
  m.impl("skip_norm", skip_norm_autograd);
}

TORCH_LIBRARY_IMPL(fairseq_rskip, CPU, m) {
  m.impl("skip_norm", skip_norm);
  m.impl("skip_norm_moments", skip_norm_moments);
  m.impl("skip_norm_moments_backward", skip_norm_backward);
  m.impl("skip_mix", skip_mix);
  m.impl("skip_mix_backward", skip_mix_backward);
}

}  // namespace rskip
