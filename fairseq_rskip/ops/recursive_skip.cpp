// The operators of fairseq_rskip on a CPU over torch's tensors, in pieces for torch's threads, and skip_norm's derivative.
// dispatch.py and mix.py have their schemas and skip_mix's derivative, rows.h the arithmetic. Computed in fp32, or fp64 where an argument has that type; tensors
// of other types and strides are converted first.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "rows.h"

namespace rskip {
namespace {

using at::ScalarType;
using at::Tensor;
using at::TensorList;
using Tensors = std::vector<Tensor>;
using Optional = std::optional<Tensor>;

// Elements of one piece of work: less is not worth waking a thread for. The gains' gradients are summed piece by piece,
// in this order, and pieces depend on the shape alone: so the sums do not depend on threads.
constexpr int64_t kPiece = 32768;
constexpr int64_t kMostPieces = 64;

// Groups of R rows of a contiguous tensor as vectors: its own memory where rows are whole vectors, otherwise a copy, zero
// beyond each row's end. Without a tensor, memory for what nobody wants.
template <class T, int R>
class Slab {
 public:
  using Vec = typename Lanes<T>::Vec;

  Slab(const Tensor& t, const Problem<T>& p)
      : data(t.defined() ? t.data_ptr<T>() : nullptr), dim(p.dim), nv(p.vectors()), padded(nv * Lanes<T>::count) {}

  Vec* at(int64_t row, int64_t count) {
    if (direct(count)) return reinterpret_cast<Vec*>(data + row * dim);
    if (!copy.get()) copy = Scratch<T>(R * nv);
    return copy.get();
  }

  Vec* read(int64_t row, int64_t count) {
    Vec* const vectors = at(row, count);
    if (direct(count)) return vectors;
    memset(static_cast<void*>(vectors), 0, R * nv * kBytes);
    for (int64_t r = 0; r < count; ++r)
      memcpy(reinterpret_cast<T*>(vectors) + r * padded, data + (row + r) * dim, dim * sizeof(T));
    return vectors;
  }

  // Stores what was written to `at(row, count)`.
  void write(int64_t row, int64_t count) const {
    for (int64_t r = 0; data && !direct(count) && r < count; ++r)
      memcpy(data + (row + r) * dim, reinterpret_cast<const T*>(copy.get()) + r * padded, dim * sizeof(T));
  }

 private:
  bool direct(int64_t count) const { return data && count == R && dim == padded; }

  T* const data;
  const int64_t dim, nv, padded;
  Scratch<T> copy;
};

// `count` tensors of a row's features as vectors, zero where there is none, and beyond each one's end.
template <class T>
Scratch<T> padded(TensorList tensors, const Problem<T>& p, int64_t count) {
  Scratch<T> memory(count * p.vectors());
  memset(static_cast<void*>(memory.get()), 0, count * p.vectors() * kBytes);
  T* to = reinterpret_cast<T*>(memory.get());
  for (const Tensor& tensor : tensors) {
    const Tensor values = tensor.to(c10::CppTypeToScalarType<T>::value).contiguous();
    memcpy(to, values.const_data_ptr<T>(), p.dim * sizeof(T));
    to += p.vectors() * p.kLanes;
  }
  return memory;
}

struct Options {
  double skip, branch, eps;
  bool rms;
};

// What an operator is called with, checked, in the type of computing.
struct Call {
  Tensor x, f;
  TensorList gains, biases;
  Options o;
  ScalarType type = ScalarType::Float;
  int64_t dim, steps, count;

  Call(const Tensor& x_, const Tensor& f_, TensorList gains_, TensorList biases_, const Options& options)
      : gains(gains_), biases(biases_), o(options), steps(gains_.size()) {
    TORCH_CHECK(
        x_.dim() > 0 && x_.sizes() == f_.sizes(), "skip_norm: x and f have shapes ", x_.sizes(), " and ", f_.sizes());
    TORCH_CHECK(steps > 0, "skip_norm: expected a gain for each step, got none");
    TORCH_CHECK(
        biases.empty() || biases.size() == gains.size(), "skip_norm: ", biases.size(), " biases for ", steps, " gains");
    dim = x_.size(-1);
    count = dim > 0 ? x_.numel() / dim : 0;
    if (x_.scalar_type() == ScalarType::Double || f_.scalar_type() == ScalarType::Double) type = ScalarType::Double;
    for (TensorList list : {gains, biases}) {
      for (const Tensor& t : list) {
        TORCH_CHECK(t.dim() == 1 && t.size(0) == dim, "skip_norm: a gain or bias of ", t.sizes(), " for rows of ", dim);
        if (t.scalar_type() == ScalarType::Double) type = ScalarType::Double;
      }
    }
    x = ready(x_);
    f = ready(f_);
  }

  Tensor ready(const Tensor& t) const { return t.to(type).contiguous(); }
  Tensor ready(const Optional& t) const { return t ? ready(*t) : Tensor(); }
  Tensor empty(at::IntArrayRef sizes) const { return at::empty(sizes, x.options()); }

  // Calls rows(problem, vectors of a row, rows of a group): as many rows as still leave x, F and all that is kept of them
  // in the first-level cache. Short rows, of image maps, have their number of vectors compiled in.
  template <class F>
  void run(F rows) const {
    if (count == 0) return;
    const auto call = [&](auto tag, auto vectors, auto group) {
      using T = decltype(tag);
      Problem<T> p{dim, steps, T(o.skip), T(o.branch), T(o.eps), o.rms, nullptr, nullptr};
      const auto gain = padded(gains, p, steps), bias = padded(biases, p, steps);
      p.gains = gain.get();
      p.biases = bias.get();
      rows(p, vectors, group);
    };
    constexpr int lanes = Lanes<float>::count;
    constexpr std::integral_constant<int, 0> any;
    constexpr std::integral_constant<int, 2> two;
    constexpr std::integral_constant<int, 4> four;
    constexpr std::integral_constant<int, lanes> many;
    if (type == ScalarType::Double) return call(double(), any, two);
    switch (dim) {
      case 16: return call(float(), std::integral_constant<int, 16 / lanes>(), many);
      case 32: return call(float(), std::integral_constant<int, 32 / lanes>(), many);
      case 64: return call(float(), std::integral_constant<int, 64 / lanes>(), four);
      default: return call(float(), any, two);
    }
  }
};

// What weighs the steps: `given` is p, or with a direction, in the forward pass, the halt of each step but the last.
struct Mix {
  Tensor given, direction;
};

template <class T>
const T* pointer(const Tensor& t) {
  return t.defined() ? t.const_data_ptr<T>() : nullptr;
}

// `kept`, of each step and row: the moments, or with `mix` what p is.
template <class T, int NV, int R>
void forward_rows(const Problem<T>& p, const Call& call, const Tensor& y, const Tensor& kept, const Mix* mix) {
  const int64_t count = call.count, grain = std::max<int64_t>(1, kPiece / (R * p.dim));
  T* const keep = kept.defined() ? kept.data_ptr<T>() : nullptr;
  const bool halts = mix && mix->direction.defined();
  const T* const given = mix ? pointer<T>(mix->given) : nullptr;
  const auto direction = padded(halts ? TensorList(mix->direction) : TensorList(), p, 1);
  at::parallel_for(0, (count + R - 1) / R, grain, [&](int64_t begin, int64_t end) {
    Group<T, NV, R> group(p);
    Slab<T, R> xs(call.x, p), fs(call.f, p), ys(y, p);
    for (int64_t k = 0; mix && !halts && k < p.steps; ++k) *group.weights(k) = typename Lanes<T>::Vec{} + given[k];
    for (int64_t row = begin * R; row < std::min(end * R, count); row += R) {
      const int64_t n = std::min<int64_t>(R, count - row), rows = mix ? p.steps : 2 * p.steps;
      if (mix) group.mix(xs.read(row, n), fs.read(row, n), halts ? direction.get() : nullptr, given, ys.at(row, n));
      else group.forward(xs.read(row, n), fs.read(row, n), ys.at(row, n));
      const auto* const from = mix ? group.weights(0) : group.moments();
      for (int64_t k = 0; keep && k < rows; ++k) memcpy(keep + k * count + row, from + k, n * sizeof(T));
      ys.write(row, n);
    }
  });
}

// The gradients of gains, then of biases, then, with `mix`, of its direction and of p, each as vectors. `kept`: the moments,
// or with `mix` gradients that reach p otherwise, if any.
template <class T, int NV, int R>
Scratch<T> backward_rows(
    const Problem<T>& p, const Call& call, const Tensor& gradient, const Tensor& kept, const Mix* mix, const Tensor& d_x,
    const Tensor& d_f) {
  using Vec = typename Lanes<T>::Vec;
  const int64_t count = call.count, groups = (count + R - 1) / R, nv = p.vectors();
  const int64_t most = std::min(kMostPieces, std::max<int64_t>(1, count * p.dim / kPiece));
  const int64_t per_piece = (groups + most - 1) / most, pieces = (groups + per_piece - 1) / per_piece;
  const int64_t width = (2 * p.steps + 1) * nv + (p.steps + p.kLanes - 1) / p.kLanes;
  const bool halts = mix && mix->direction.defined();
  const T *const keep = pointer<T>(kept), *const given = mix ? pointer<T>(mix->given) : nullptr;
  const auto direction = padded(halts ? TensorList(mix->direction) : TensorList(), p, 1);
  Scratch<T> memory(pieces * width);
  memset(static_cast<void*>(memory.get()), 0, pieces * width * kBytes);
  at::parallel_for(0, pieces, 1, [&](int64_t begin, int64_t end) {
    Group<T, NV, R> group(p);
    Slab<T, R> xs(call.x, p), fs(call.f, p), gs(gradient, p), dxs(d_x, p), dfs(d_f, p);
    for (int64_t row = begin * per_piece * R; row < std::min(end * per_piece * R, count); row += R) {
      Vec *const sums = memory.get() + row / (per_piece * R) * width, *const d_direction = sums + 2 * p.steps * nv;
      const int64_t n = std::min<int64_t>(R, count - row);
      const Vec *const x = xs.read(row, n), *const f = fs.read(row, n), *const g = gs.read(row, n);
      const auto load = [&](Vec* to, const T* from) {
        for (int64_t k = 0; from && k < (mix ? p.steps : 2 * p.steps); ++k) {
          if (n < R) to[k] = Vec{};
          memcpy(to + k, from + k * count + row, n * sizeof(T));
        }
      };
      if (mix) {
        for (int64_t k = 0; k < p.steps; ++k) *group.slopes(k) = Vec{}, *group.weights(k) = Vec{} + given[halts ? 0 : k];
        load(group.slopes(0), keep);
        load(group.weights(0), halts ? given : nullptr);
        group.mix_backward(x, f, g, halts ? direction.get() : nullptr, dxs.at(row, n), dfs.at(row, n), sums, d_direction);
        for (int64_t k = 0; k < p.steps; ++k)
          for (int64_t r = 0; r < n; ++r)
            reinterpret_cast<T*>(d_direction + nv)[k] += reinterpret_cast<const T*>(group.slopes(k))[r];
      } else {
        load(group.moments(), keep);
        group.backward(x, f, g, dxs.at(row, n), dfs.at(row, n), sums);
      }
      dxs.write(row, n);
      dfs.write(row, n);
    }
  });
  for (int64_t piece = 1; piece < pieces; ++piece)
    for (int64_t i = 0; i < width; ++i) memory.get()[i] += memory.get()[piece * width + i];
  return memory;
}

// Gradients of d_x, d_f as wanted, and appends those of gains, biases and, with `mix`, first of p and its direction. With
// `consume` the memory of `gradient`, which only the last pass over a row overwrites, serves for one of them.
Tensors backward(
    const Call& call, const Tensor& gradient, const Tensor& kept, const Mix* mix, const Tensor& x, const Tensor& f,
    bool wanted_x, bool wanted_f, bool wanted_params, bool consume = false) {
  const Tensor g = call.ready(gradient);
  consume = consume && g.is_same(gradient);
  const Tensor d_x = !wanted_x ? Tensor() : consume ? g : call.empty(x.sizes());
  const Tensor d_f = !wanted_f ? Tensor() : consume && !wanted_x ? g : call.empty(f.sizes());
  Tensors results;
  if (wanted_x) results.push_back(d_x);
  if (wanted_f) results.push_back(d_f);
  Tensors like;
  if (mix) like.push_back(call.empty({call.steps - mix->direction.defined()}));
  if (mix && mix->direction.defined()) like.push_back(mix->direction);
  if (wanted_params)
    for (TensorList list : {call.gains, call.biases}) like.insert(like.end(), list.begin(), list.end());
  Tensors sums;
  for (const Tensor& t : like) sums.push_back(call.empty(t.sizes()).zero_());
  call.run([&](const auto& p, auto nv, auto group) {
    using T = std::decay_t<decltype(p.skip)>;
    const auto totals = backward_rows<T, nv(), group()>(p, call, g, kept, mix, d_x, d_f);
    const int64_t before = sums.size() - (wanted_params ? call.gains.size() + call.biases.size() : 0);
    for (int64_t i = 0; i < static_cast<int64_t>(sums.size()); ++i) {
      const int64_t k = i - before;  // a step's gain and bias are neighbours
      const int64_t at = k < 0 ? 2 * p.steps + (i == 0) : 2 * (k % p.steps) + k / p.steps;
      memcpy(sums[i].template data_ptr<T>(), totals.get() + at * p.vectors(), sums[i].numel() * sizeof(T));
    }
  });
  for (size_t i = 0; i < sums.size(); ++i) results.push_back(sums[i].to(like[i].scalar_type()));
  if (wanted_x) results[0] = results[0].to(x.scalar_type());
  if (wanted_f) results[wanted_x] = results[wanted_x].to(f.scalar_type());
  return results;
}

// y, and the moments, (2 steps, rows), where they are wanted.
std::tuple<Tensor, Tensor> forward(const Call& call, ScalarType type, bool keep) {
  const Tensor y = call.empty(call.x.sizes()), moments = keep ? call.empty({2 * call.steps, call.count}) : Tensor();
  call.run([&](const auto& p, auto nv, auto group) {
    forward_rows<std::decay_t<decltype(p.skip)>, nv(), group()>(p, call, y, moments, nullptr);
  });
  return {y.to(type), moments};
}

Tensor skip_norm(
    const Tensor& x, const Tensor& f, TensorList gains, TensorList biases, double skip, double branch, double eps,
    bool rms) {
  return std::get<0>(forward(Call(x, f, gains, biases, {skip, branch, eps, rms}), x.scalar_type(), false));
}

std::tuple<Tensor, Tensor> skip_norm_moments(
    const Tensor& x, const Tensor& f, TensorList gains, TensorList biases, double skip, double branch, double eps,
    bool rms) {
  return forward(Call(x, f, gains, biases, {skip, branch, eps, rms}), x.scalar_type(), true);
}

// Whether the gradients of x and f are one tensor.
bool is_shared(const Tensor& x, const Tensor& f, TensorList gains, const Options& o) {
  return gains.size() == 1 && o.skip == o.branch && x.scalar_type() == f.scalar_type();
}

// Those wanted of the gradients of x, f, each gain, each bias; that of f is left out where it is x's.
Tensors skip_norm_gradients(
    const Tensor& gradient, const Tensor& x, const Tensor& f, TensorList gains, TensorList biases,
    const Tensor& moments, const Options& o, bool wanted_x, bool wanted_f, bool wanted_params, bool consume) {
  wanted_f = wanted_f && !(wanted_x && is_shared(x, f, gains, o));
  const Call call(x, f, gains, biases, o);
  return backward(call, gradient, moments, nullptr, x, f, wanted_x, wanted_f, wanted_params, consume);
}

Tensors skip_norm_backward(
    const Tensor& gradient, const Tensor& x, const Tensor& f, TensorList gains, TensorList biases,
    const Tensor& moments, double skip, double branch, double eps, bool rms, bool wanted_x, bool wanted_f,
    bool wanted_params) {
  const Options o{skip, branch, eps, rms};
  return skip_norm_gradients(gradient, x, f, gains, biases, moments, o, wanted_x, wanted_f, wanted_params, false);
}

// sum_k p_k y_k, and with a direction also p, (steps, rows ...), in the type of computing.
std::tuple<Tensor, Tensor> skip_mix(
    const Tensor& x, const Tensor& f, TensorList gains, TensorList biases, const Tensor& weights,
    const Optional& direction, double skip, double branch, double eps, bool rms) {
  const Call call(x, f, gains, biases, {skip, branch, eps, rms});
  TORCH_CHECK(
      weights.dim() == 1 && weights.size(0) == call.steps - direction.has_value(), "skip_mix: weights of shape ",
      weights.sizes(), " for ", call.steps, " steps: expected ", call.steps - direction.has_value());
  TORCH_CHECK(
      !direction || (direction->dim() == 1 && direction->size(0) == call.dim), "skip_mix: a direction for rows of ",
      call.dim, " expected");
  const Mix mix{call.ready(weights), call.ready(direction)};
  std::vector<int64_t> shape = x.sizes().vec();
  shape.pop_back();
  shape.insert(shape.begin(), call.steps);
  const Tensor y = call.empty(x.sizes()), p = call.empty(direction ? shape : std::vector<int64_t>{0});
  call.run([&](const auto& problem, auto nv, auto group) {
    const Tensor kept = direction ? p : Tensor();
    forward_rows<std::decay_t<decltype(problem.skip)>, nv(), group()>(problem, call, y, kept, &mix);
  });
  return {y.to(x.scalar_type()), p};
}

// The gradients of x, f, weights, direction (where there is one), gains and biases. p: the weights, or with a direction
// what skip_mix returned, whose own gradient is d_p.
Tensors skip_mix_backward(
    const Tensor& gradient, const Optional& d_p, const Tensor& x, const Tensor& f, TensorList gains, TensorList biases,
    const Tensor& p, const Optional& direction, double skip, double branch, double eps, bool rms) {
  const Call call(x, f, gains, biases, {skip, branch, eps, rms});
  const Mix mix{call.ready(p), call.ready(direction)};
  Tensors results = backward(call, gradient, call.ready(d_p), &mix, x, f, true, true, true);
  if (direction) results[3] = results[3].to(direction->scalar_type());
  return results;
}

template <class Signature>
auto handle(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// Whether nothing (fake tensors, a mode, a tracer) watches the operators that are called on t.
bool is_plain(const Tensor& t) {
  return !t.key_set().has(c10::DispatchKey::Python) &&
      !c10::impl::tls_local_dispatch_key_set().included_.has(c10::DispatchKey::Python);
}

// skip_norm's derivative: it keeps x, F and the moments.
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

  // By reference: where nothing else holds the gradient, its memory serves for one of the results.
  static Variables backward(Context* context, Variables& gradients) {
    const Tensor& gradient = gradients[0];
    const Variables saved = context->get_saved_variables();
    const auto numbers = context->saved_data["options"].toDoubleVector();
    const Options o{numbers[0], numbers[1], numbers[2], numbers[3] != 0};
    const size_t steps = numbers[4], inputs = saved.size() - 1;
    if (at::GradMode::is_enabled()) return differentiable(context, saved, steps, o, gradient);
    const TensorList all(saved), gains = all.slice(2, steps), biases = all.slice(2 + steps, inputs - 2 - steps);
    const bool wanted_x = context->needs_input_grad(0), wanted_f = context->needs_input_grad(1);
    bool wanted_params = false;
    for (size_t i = 2; i < inputs; ++i) wanted_params = wanted_params || context->needs_input_grad(i);
    Tensors found;
    if (is_plain(gradient)) {
      const bool alone = gradient.use_count() == 1 && gradient.storage().use_count() == 1;
      found = skip_norm_gradients(
          gradient, saved[0], saved[1], gains, biases, saved.back(), o, wanted_x, wanted_f, wanted_params, alone);
    } else {
      static const auto op = handle<decltype(skip_norm_backward)>("fairseq_rskip::skip_norm_moments_backward");
      found = op.call(
          gradient, saved[0], saved[1], gains, biases, saved.back(), o.skip, o.branch, o.eps, o.rms, wanted_x, wanted_f,
          wanted_params);
    }
    const bool shared = is_shared(saved[0], saved[1], gains, o);
    Variables results(inputs + 4);
    size_t next = 0;
    if (wanted_x) results[0] = found[next++];
    if (wanted_f) results[1] = wanted_x && shared ? results[0] : found[next++];
    for (size_t i = 2; wanted_params && i < inputs; ++i) results[i] = found[next++];
    return results;
  }

  // The gradients as functions of the inputs, for a second derivative: those of the reference.
  static Variables differentiable(
      Context* context, const Variables& saved, size_t steps, const Options& o, const Tensor& gradient) {
    Variables inputs, wanted, results(saved.size() + 3);
    for (size_t i = 0; i + 1 < saved.size(); ++i) {
      inputs.push_back(saved[i].view_as(saved[i]));  // a tensor may stand in two places
      if (context->needs_input_grad(i)) wanted.push_back(inputs[i]);
    }
    const TensorList all(inputs);
    static const auto op = handle<decltype(skip_norm)>("fairseq_rskip::skip_norm_reference");
    const Tensor y = op.call(
        inputs[0], inputs[1], all.slice(2, steps), all.slice(2 + steps), o.skip, o.branch, o.eps, o.rms);
    const Variables found = torch::autograd::grad({y}, wanted, {gradient}, true, true);
    for (size_t i = 0, next = 0; i < inputs.size(); ++i)
      if (context->needs_input_grad(i)) results[i] = found[next++];
    return results;
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

TORCH_LIBRARY_IMPL(fairseq_rskip, CPU, m) {
  m.impl("skip_norm", skip_norm);
  m.impl("skip_norm_moments", skip_norm_moments);
  m.impl("skip_norm_moments_backward", skip_norm_backward);
  m.impl("skip_mix", skip_mix);
  m.impl("skip_mix_backward", skip_mix_backward);
}

TORCH_LIBRARY_IMPL(fairseq_rskip, AutogradCPU, m) {
  m.impl("skip_norm", skip_norm_autograd);
}

}  // namespace rskip
