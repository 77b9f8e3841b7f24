// The operators fairseq_rskip::skip_norm, with its derivative, and skip_mix on a CPU. dispatch.py and mix.py have the schemas.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "tensors.h"

namespace rskip {
namespace {

struct Options {
  double skip, branch, eps;
  bool rms;
};

struct Wanted {
  bool x, f, params;
};

// Calls f with the type of computing, the vectors of a row and the rows of a group: as many as still leave x, F and all
// that is kept of them in the first-level cache.
template <bool RMS, class F>
void with_group(bool wide, int64_t dim, F f) {
  const auto call = [f](auto type, auto vectors, auto rows) { return f(type, vectors, rows, std::bool_constant<RMS>()); };
  constexpr std::integral_constant<int, 0> any;
  constexpr std::integral_constant<int, 1> one;
  constexpr std::integral_constant<int, 2> two;
  constexpr std::integral_constant<int, 4> four;
  constexpr std::integral_constant<int, 16> many;
  if (wide) return call(double(), any, two);
  if constexpr (RMS) return call(float(), any, two);  // short rows, of image maps, are rare here: not worth their compile time
  else switch ((dim + 15) / 16) {
    case 1: return call(float(), one, many);
    case 2: return call(float(), two, many);
    case 4: return call(float(), four, four);
    default: return call(float(), any, two);
  }
}

bool is_wide(const Tensor& x, const Tensor& f, TensorList gains) {
  bool wide = x.scalar_type() == ScalarType::Double || f.scalar_type() == ScalarType::Double;
  for (const Tensor& gain : gains) wide = wide || gain.scalar_type() == ScalarType::Double;
  return wide;
}

template <class T>
Problem<T> problem(const Tensor& x, TensorList gains, const Options& o) {
  return {x.size(-1), static_cast<int64_t>(gains.size()), T(o.skip), T(o.branch), T(o.eps), nullptr, nullptr};
}

void check(const Tensor& x, const Tensor& f, TensorList gains, TensorList biases) {
  TORCH_CHECK(x.dim() > 0 && x.sizes() == f.sizes(), "skip_norm: x and f have shapes ", x.sizes(), " and ", f.sizes());
  TORCH_CHECK(!gains.empty(), "skip_norm: expected a gain for each step, got none");
  TORCH_CHECK(
      biases.empty() || biases.size() == gains.size(), "skip_norm: ", biases.size(), " biases for ", gains.size(), " gains");
  for (TensorList list : {gains, biases}) {
    for (const Tensor& parameter : list) {
      TORCH_CHECK(
          parameter.dim() == 1 && parameter.size(0) == x.size(-1), "skip_norm: a gain or bias of shape ", parameter.sizes(),
          " for rows of ", x.size(-1));
    }
  }
}

void check_mix(
    const Tensor& x, TensorList gains, const Tensor& weights, const std::optional<Tensor>& direction, size_t expected) {
  TORCH_CHECK(
      weights.dim() == 1 && weights.size(0) == static_cast<int64_t>(expected), "skip_mix: weights of shape ", weights.sizes(),
      " for ", gains.size(), " steps: expected ", expected);
  TORCH_CHECK(
      !direction || (direction->dim() == 1 && direction->size(0) == x.size(-1)), "skip_mix: a direction for rows of ",
      x.size(-1), " expected");
}

template <class F>
void run(const Tensor& x, const Tensor& f, TensorList gains, TensorList biases, const Options& o, F rows) {
  const auto call = [&](auto type, auto nv, auto group, auto rms) {
    using T = decltype(type);
    Problem<T> p = problem<T>(x, gains, o);
    const Params<T> params(gains, biases, p);
    rows(p, nv, group, rms);
  };
  o.rms ? with_group<true>(is_wide(x, f, gains), x.size(-1), call) : with_group<false>(is_wide(x, f, gains), x.size(-1), call);
}

Tensor forward(const Tensor& x, const Tensor& f, TensorList gains, TensorList biases, const Options& o) {
  check(x, f, gains, biases);
  const Tensor y = at::empty(x.sizes(), x.options());
  if (x.numel() == 0) return y;
  run(x, f, gains, biases, o, [&](const auto& p, auto nv, auto group, auto rms) {
    using T = std::decay_t<decltype(p.skip)>;
    forward_rows<T, nv(), group(), rms()>(p, Rows(x), Rows(f), Rows(y), nullptr, x.numel() / p.dim);
  });
  return y;
}

// Whether the gradients of x and f are one tensor.
bool is_shared(const Tensor& x, const Tensor& f, TensorList gains, const Options& o) {
  return gains.size() == 1 && o.skip == o.branch && x.scalar_type() == f.scalar_type();
}

// Memory for the gradients of gains and biases; where there are no biases, nothing for each.
std::vector<Tensor> like(TensorList gains, TensorList biases) {
  std::vector<Tensor> made;
  for (TensorList list : {gains, biases})
    for (const Tensor& parameter : list) made.push_back(at::empty(parameter.sizes(), parameter.options()));
  made.resize(2 * gains.size());
  return made;
}

// [of x, of f, of each gain, of each bias]: those wanted; that of f is left out where `is_shared`. Overwrites `gradient`
// and returns it as one of them if `consume`.
std::vector<Tensor> backward(
    const Tensor& gradient, const Tensor& x, const Tensor& f, TensorList gains, TensorList biases, const Options& o,
    Wanted wanted, bool consume) {
  check(x, f, gains, biases);
  if (wanted.x && is_shared(x, f, gains, o)) wanted.f = false;
  std::vector<Tensor> results, d_params;
  Tensor d_x, d_f;
  consume = consume && gradient.is_contiguous();
  for (bool is_x : {true, false}) {
    if (!(is_x ? wanted.x : wanted.f)) continue;
    const Tensor& same = is_x ? x : f;
    const bool take = consume && gradient.scalar_type() == same.scalar_type();
    (is_x ? d_x : d_f) = take ? gradient : at::empty(same.sizes(), same.options());
    results.push_back(is_x ? d_x : d_f);
    consume = consume && !take;
  }
  if (wanted.params) {
    d_params = like(gains, biases);
    std::copy_if(d_params.begin(), d_params.end(), std::back_inserter(results), [](const Tensor& t) { return t.defined(); });
  }
  if (x.size(-1) == 0) return results;
  run(x, f, gains, biases, o, [&](const auto& p, auto nv, auto group, auto rms) {
    using T = std::decay_t<decltype(p.skip)>;
    backward_rows<T, nv(), group(), rms()>(
        p, Rows(x), Rows(f), Rows(gradient), nullptr, d_x, d_f, d_params, x.numel() / p.dim);
  });
  return results;
}

// sum_k p_k y_k, and with a direction also p, (steps, rows ...), in the type of computing.
std::tuple<Tensor, Tensor> skip_mix(
    const Tensor& x, const Tensor& f, TensorList gains, TensorList biases, const Tensor& weights,
    const std::optional<Tensor>& direction, double skip, double branch, double eps, bool rms) {
  check(x, f, gains, biases);
  const Options o{skip, branch, eps, rms};
  const auto options = x.options().dtype(is_wide(x, f, gains) ? ScalarType::Double : ScalarType::Float);
  std::vector<int64_t> shape = x.sizes().vec();
  shape.pop_back();
  shape.insert(shape.begin(), gains.size());
  const Tensor y = at::empty(x.sizes(), x.options()), p_out = at::empty(direction ? shape : std::vector<int64_t>{0}, options);
  const Tensor given = weights.to(options.dtype()).contiguous();
  check_mix(x, gains, given, direction, direction ? gains.size() - 1 : gains.size());
  if (x.numel() == 0) return {y, p_out};
  run(x, f, gains, biases, o, [&](const auto& p, auto nv, auto group, auto rms) {
    using T = std::decay_t<decltype(p.skip)>;
    const Padded<T> along(direction, p);
    const Mix<T> mix{given.const_data_ptr<T>(), along.get(), direction ? p_out.mutable_data_ptr<T>() : nullptr, nullptr};
    forward_rows<T, nv(), group(), rms()>(p, Rows(x), Rows(f), Rows(y), &mix, x.numel() / p.dim);
  });
  return {y, p_out};
}

// The gradients of x, f, weights, direction (where there is one), gains and biases. p: the weights, or with a direction
// what skip_mix returned, whose own gradient is d_p.
std::vector<Tensor> skip_mix_backward(
    const Tensor& gradient, const std::optional<Tensor>& d_p, const Tensor& x, const Tensor& f, TensorList gains,
    TensorList biases, const Tensor& p, const std::optional<Tensor>& direction, double skip, double branch, double eps,
    bool rms) {
  check(x, f, gains, biases);
  const Options o{skip, branch, eps, rms};
  const auto options = x.options().dtype(is_wide(x, f, gains) ? ScalarType::Double : ScalarType::Float);
  const Tensor given = p.to(options.dtype()).contiguous(), more = d_p ? d_p->to(options.dtype()).contiguous() : Tensor();
  std::vector<Tensor> totals = like(gains, biases);
  totals.push_back(direction ? at::empty(direction->sizes(), direction->options()) : Tensor());
  totals.push_back(at::empty({static_cast<int64_t>(gains.size()) - (direction ? 1 : 0)}, options));
  const Tensor d_x = at::empty(x.sizes(), x.options()), d_f = at::empty(f.sizes(), f.options());
  if (x.size(-1) > 0) {
    run(x, f, gains, biases, o, [&](const auto& p, auto nv, auto group, auto rms) {
      using T = std::decay_t<decltype(p.skip)>;
      const Padded<T> along(direction, p);
      const Mix<T> mix{given.const_data_ptr<T>(), along.get(), nullptr, d_p ? more.const_data_ptr<T>() : nullptr};
      backward_rows<T, nv(), group(), rms()>(p, Rows(x), Rows(f), Rows(gradient), &mix, d_x, d_f, totals, x.numel() / p.dim);
    });
  }
  std::vector<Tensor> results{d_x, d_f, totals.back()};
  if (direction) results.push_back(totals.end()[-2]);
  std::copy_if(totals.begin(), totals.end() - 2, std::back_inserter(results), [](const Tensor& t) { return t.defined(); });
  return results;
}

Tensor skip_norm(
    const Tensor& x, const Tensor& f, TensorList gains, TensorList biases, double skip, double branch, double eps,
    bool rms) {
  return forward(x, f, gains, biases, {skip, branch, eps, rms});
}

std::vector<Tensor> skip_norm_backward(
    const Tensor& gradient, const Tensor& x, const Tensor& f, TensorList gains, TensorList biases, double skip, double branch,
    double eps, bool rms, bool wanted_x, bool wanted_f, bool wanted_params) {
  return backward(
      gradient, x, f, gains, biases, {skip, branch, eps, rms}, {wanted_x, wanted_f, wanted_params}, false);
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

struct SkipNorm : torch::autograd::Function<SkipNorm> {
  using Variables = torch::autograd::variable_list;

  static Tensor forward(
      torch::autograd::AutogradContext* context, const Tensor& x, const Tensor& f, TensorList gains, TensorList biases,
      double skip, double branch, double eps, bool rms) {
    Variables saved{x, f};
    saved.insert(saved.end(), gains.begin(), gains.end());
    saved.insert(saved.end(), biases.begin(), biases.end());
    context->save_for_backward(std::move(saved));
    context->saved_data["options"] = c10::List<double>({skip, branch, eps, double(rms), double(gains.size())});
    at::AutoDispatchBelowADInplaceOrView below;
    static const auto op = handle<decltype(skip_norm)>("fairseq_rskip::skip_norm");
    return op.call(x, f, gains, biases, skip, branch, eps, rms);
  }

  // By reference: where nothing else holds the gradient, its memory serves for one of the results.
  static Variables backward(torch::autograd::AutogradContext* context, Variables& gradients) {
    const Variables saved = context->get_saved_variables();
    const auto numbers = context->saved_data["options"].toDoubleVector();
    const Options o{numbers[0], numbers[1], numbers[2], numbers[3] != 0};
    const size_t steps = static_cast<size_t>(numbers[4]);
    const TensorList all(saved), gains = all.slice(2, steps), biases = all.slice(2 + steps);
    const Tensor &x = saved[0], &f = saved[1], &gradient = gradients[0];
    Variables results(saved.size() + 4);
    if (at::GradMode::is_enabled()) {
      differentiable(context, saved, steps, o, gradient, results);
      return results;
    }
    Wanted wanted{context->needs_input_grad(0), context->needs_input_grad(1), false};
    for (size_t i = 2; i < saved.size(); ++i) wanted.params = wanted.params || context->needs_input_grad(i);
    Variables found;
    if (is_plain(gradient)) {
      const bool alone = gradient.use_count() == 1 && gradient.storage().use_count() == 1;
      found = rskip::backward(gradient, x, f, gains, biases, o, wanted, alone);
    } else {
      static const auto op = handle<decltype(skip_norm_backward)>("fairseq_rskip::skip_norm_backward");
      found = op.call(
          gradient, x, f, gains, biases, o.skip, o.branch, o.eps, o.rms, wanted.x, wanted.f, wanted.params);
    }
    size_t next = 0;
    if (wanted.x) results[0] = found[next++];
    if (wanted.f) results[1] = wanted.x && is_shared(x, f, gains, o) ? results[0] : found[next++];
    for (size_t i = 2; wanted.params && i < saved.size(); ++i) results[i] = found[next++];
    return results;
  }

  // The gradients as functions of the inputs, for a second derivative: those of the reference.
  static void differentiable(
      torch::autograd::AutogradContext* context, const Variables& saved, size_t steps, const Options& o,
      const Tensor& gradient, Variables& results) {
    Variables inputs, wanted;
    for (const Tensor& t : saved) inputs.push_back(t.view_as(t));  // a tensor may stand in two places
    for (size_t i = 0; i < inputs.size(); ++i)
      if (context->needs_input_grad(i)) wanted.push_back(inputs[i]);
    const TensorList all(inputs);
    static const auto op = handle<decltype(skip_norm)>("fairseq_rskip::skip_norm_reference");
    const Tensor y = op.call(
        inputs[0], inputs[1], all.slice(2, steps), all.slice(2 + steps), o.skip, o.branch, o.eps, o.rms);
    const Variables found = torch::autograd::grad({y}, wanted, {gradient}, true, true);
    for (size_t i = 0, next = 0; i < inputs.size(); ++i)
      if (context->needs_input_grad(i)) results[i] = found[next++];
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
  m.impl("skip_norm_backward", skip_norm_backward);
  m.impl("skip_mix", skip_mix);
  m.impl("skip_mix_backward", skip_mix_backward);
}

TORCH_LIBRARY_IMPL(fairseq_rskip, AutogradCPU, m) {
  m.impl("skip_norm", skip_norm_autograd);
}

}  // namespace rskip
