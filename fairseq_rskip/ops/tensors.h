// The kernels of rows.h over torch's tensors: any strides and floating types, in pieces for torch's threads.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "rows.h"

namespace rskip {

using at::ScalarType;
using at::Tensor;
using at::TensorList;

// Elements of one piece of work: less is not worth waking a thread for. The gains' gradients are summed piece by piece,
// in this order, and pieces depend on the shape alone: so the sums do not depend on threads.
constexpr int64_t kPiece = 32768;
constexpr int64_t kMostPieces = 64;

template <class F>
void with_type(ScalarType type, F f) {
  switch (type) {
    case ScalarType::Float: return f(float{});
    case ScalarType::Double: return f(double{});
    case ScalarType::Half: return f(at::Half{});
    case ScalarType::BFloat16: return f(at::BFloat16{});
    default: TORCH_CHECK(false, "skip_norm: expected float16, bfloat16, float32 or float64, got ", type);
  }
}

// A tensor (..., dim) as rows: each contiguous, `stride` elements apart. Copies only what cannot be seen so.
struct Rows {
  Tensor tensor;
  int64_t stride;

  explicit Rows(const Tensor& t) : tensor(t), stride(t.size(-1)) {
    if (t.is_contiguous()) return;
    int64_t expected = -1;
    bool regular = t.stride(-1) == 1;
    for (int64_t d = t.dim() - 2; d >= 0 && regular; --d) {
      if (t.size(d) == 1) continue;
      if (expected < 0) stride = t.stride(d);
      regular = expected < 0 || t.stride(d) == expected;
      expected = t.stride(d) * t.size(d);
    }
    if (!regular) {
      tensor = t.contiguous();
      stride = t.size(-1);
    }
  }
};

template <class T>
void clear(typename Lanes<T>::Vec* vectors, int64_t count) {
  memset(static_cast<void*>(vectors), 0, count * kBytes);
}

template <class T>
void copy_to(const Tensor& tensor, T* to) {
  const Tensor values = tensor.contiguous();
  with_type(values.scalar_type(), [&](auto tag) {
    const auto* from = static_cast<const decltype(tag)*>(values.const_data_ptr());
    for (int64_t i = 0; i < values.numel(); ++i) to[i] = static_cast<T>(from[i]);
  });
}

// Groups of R rows of a tensor as vectors of T: the tensor's own memory where it is laid out so, otherwise a copy, zero
// beyond each row's end. Without a tensor, memory for what nobody wants.
template <class T, int R>
class Slab {
 public:
  using Vec = typename Lanes<T>::Vec;

  explicit Slab(const Problem<T>& p) : nv(p.vectors()) {}
  Slab(const Rows& rows, const Problem<T>& p)
      : data(rows.tensor.data_ptr()),
        type(rows.tensor.scalar_type()),
        stride(rows.stride),
        dim(p.dim),
        nv(p.vectors()),
        direct(type == c10::CppTypeToScalarType<T>::value && dim == nv * p.kLanes && stride == dim) {}

  Vec* at(int64_t row, int64_t count) {
    if (direct && count == R) return reinterpret_cast<Vec*>(static_cast<T*>(data) + row * stride);
    if (!copy.get()) copy = Scratch<T>(R * nv);
    return copy.get();
  }

  Vec* read(int64_t row, int64_t count) {
    Vec* vectors = at(row, count);
    if (vectors != copy.get()) return vectors;
    clear<T>(vectors, R * nv);
    T* to = reinterpret_cast<T*>(vectors);
    with_type(type, [&](auto tag) {
      for (int64_t r = 0; r < count; ++r) {
        const auto* from = static_cast<decltype(tag)*>(data) + (row + r) * stride;
        for (int64_t i = 0; i < dim; ++i) to[r * nv * kLanes + i] = static_cast<T>(from[i]);
      }
    });
    return vectors;
  }

  // Stores what was written to `at(row, count)`.
  void write(int64_t row, int64_t count) {
    if (!data || (direct && count == R)) return;
    const T* from = reinterpret_cast<const T*>(copy.get());
    with_type(type, [&](auto tag) {
      for (int64_t r = 0; r < count; ++r) {
        auto* to = static_cast<decltype(tag)*>(data) + (row + r) * stride;
        for (int64_t i = 0; i < dim; ++i) to[i] = static_cast<decltype(tag)>(from[r * nv * kLanes + i]);
      }
    });
  }

 private:
  static constexpr int kLanes = Problem<T>::kLanes;
  void* data = nullptr;
  ScalarType type{};
  int64_t stride = 0, dim = 0, nv = 0;
  bool direct = false;
  Scratch<T> copy;
};

// A tensor of a row's features as vectors of T, zero beyond the end; none where there is no tensor.
template <class T>
struct Padded {
  Scratch<T> memory;

  Padded(const std::optional<Tensor>& tensor, const Problem<T>& p) {
    if (!tensor) return;
    memory = Scratch<T>(p.vectors());
    clear<T>(memory.get(), p.vectors());
    copy_to(*tensor, reinterpret_cast<T*>(memory.get()));
  }
  const typename Lanes<T>::Vec* get() const { return memory.get(); }
};

// Gains and biases as vectors of T.
template <class T>
struct Params {
  using Vec = typename Lanes<T>::Vec;
  Scratch<T> memory;

  Params(TensorList gains, TensorList biases, Problem<T>& p) : memory(2 * gains.size() * p.vectors()) {
    clear<T>(memory.get(), 2 * gains.size() * p.vectors());
    const int64_t padded = p.vectors() * p.kLanes;
    T* to = reinterpret_cast<T*>(memory.get());
    for (TensorList list : {gains, biases}) {
      T* start = to;
      for (const Tensor& parameter : list) {
        copy_to(parameter, to);
        to += padded;
      }
      to = start + gains.size() * padded;
    }
    p.gains = memory.get();
    p.biases = p.gains + gains.size() * p.vectors();
  }
};

// What weighs the steps, and the gradients of that.
template <class T>
struct Mix {
  using Vec = typename Lanes<T>::Vec;
  const T* given;  // forward: p, or with a direction the halt of each step but the last; backward: p
  const Vec* direction;  // null: one p for all rows
  T* p;  // of each step and row, with a direction
  const T* d_p;  // gradients that reach p otherwise; null: none
};

template <class T, int NV, int R, bool RMS>
void forward_rows(const Problem<T>& p, const Rows& x, const Rows& f, const Rows& y, const Mix<T>* mix, int64_t count) {
  const int64_t groups = (count + R - 1) / R;
  const int64_t grain = std::max<int64_t>(1, kPiece / (R * p.dim));
  at::parallel_for(0, groups, grain, [&](int64_t begin, int64_t end) {
    Group<T, NV, R, RMS> group(p);
    Slab<T, R> xs(x, p), fs(f, p), ys(y, p);
    for (int64_t k = 0; mix && !mix->direction && k < p.steps; ++k) *group.weights(k) = typename Lanes<T>::Vec{} + mix->given[k];
    for (int64_t row = begin * R; row < std::min(end * R, count); row += R) {
      const int64_t n = std::min<int64_t>(R, count - row);
      if (!mix) {
        group.forward(xs.read(row, n), fs.read(row, n), ys.at(row, n));
      } else {
        group.mix(xs.read(row, n), fs.read(row, n), mix->direction, mix->given, ys.at(row, n));
        for (int64_t k = 0; mix->direction && k < p.steps; ++k) memcpy(mix->p + k * count + row, group.weights(k), n * sizeof(T));
      }
      ys.write(row, n);
    }
  });
}

// Adds to `sums` as `totals` of backward_rows are laid out.
template <class T, int NV, int R, bool RMS>
void mix_backward(
    Group<T, NV, R, RMS>& group, const Problem<T>& p, const Mix<T>& mix, int64_t row, int64_t n, int64_t count,
    const typename Lanes<T>::Vec* x, const typename Lanes<T>::Vec* f, const typename Lanes<T>::Vec* g,
    typename Lanes<T>::Vec* d_x, typename Lanes<T>::Vec* d_f, typename Lanes<T>::Vec* sums) {
  using Vec = typename Lanes<T>::Vec;
  for (int64_t k = 0; k < p.steps; ++k) {
    Vec weight = Vec{} + (mix.direction ? T(0) : mix.given[k]), slope = {};
    if (mix.direction) memcpy(&weight, mix.given + k * count + row, n * sizeof(T));
    if (mix.d_p) memcpy(&slope, mix.d_p + k * count + row, n * sizeof(T));
    *group.weights(k) = weight;
    *group.slopes(k) = slope;
  }
  Vec *const d_direction = sums + 2 * p.steps * p.vectors(), *const d_weights = d_direction + p.vectors();
  group.mix_backward(x, f, g, mix.direction, d_x, d_f, sums, d_direction);
  T* const to = reinterpret_cast<T*>(d_weights);
  for (int64_t k = 0; k < p.steps; ++k)
    for (int64_t r = 0; r < n; ++r) to[k] += reinterpret_cast<const T*>(group.slopes(k))[r];
}

// `totals` are the gradients of gains, then of biases, then, with `mix`, of its direction and of what it was given; they may
// be shorter than their rows, or undefined.
template <class T, int NV, int R, bool RMS>
void backward_rows(
    const Problem<T>& p, const Rows& x, const Rows& f, const Rows& gradient, const Mix<T>* mix, const Tensor& d_x,
    const Tensor& d_f, const std::vector<Tensor>& totals, int64_t count) {
  using Vec = typename Lanes<T>::Vec;
  const int64_t groups = (count + R - 1) / R;
  const int64_t most = std::min(kMostPieces, std::max<int64_t>(1, count * p.dim / kPiece));
  const int64_t per_piece = std::max<int64_t>(1, (groups + most - 1) / most);
  const int64_t pieces = (groups + per_piece - 1) / per_piece;
  const int64_t width = (2 * p.steps + (mix ? 1 : 0)) * p.vectors() + (mix ? (p.steps + p.kLanes - 1) / p.kLanes : 0);
  const Scratch<T> memory(pieces * width);
  Vec* const sums = memory.get();
  at::parallel_for(0, pieces, 1, [&](int64_t begin, int64_t end) {
    Group<T, NV, R, RMS> group(p);
    Slab<T, R> xs(x, p), fs(f, p), gs(gradient, p), dxs(p), dfs(p);
    if (d_x.defined()) dxs = Slab<T, R>(Rows(d_x), p);
    if (d_f.defined()) dfs = Slab<T, R>(Rows(d_f), p);
    for (int64_t piece = begin; piece < end; ++piece) {
      Vec* const sum = sums + piece * width;
      clear<T>(sum, width);
      const int64_t last = std::min((piece + 1) * per_piece * R, count);
      for (int64_t row = piece * per_piece * R; row < last; row += R) {
        const int64_t n = std::min<int64_t>(R, count - row);
        const Vec *const in_x = xs.read(row, n), *const in_f = fs.read(row, n), *const g = gs.read(row, n);
        if (mix) mix_backward(group, p, *mix, row, n, count, in_x, in_f, g, dxs.at(row, n), dfs.at(row, n), sum);
        else group.backward(in_x, in_f, g, dxs.at(row, n), dfs.at(row, n), sum);
        dxs.write(row, n);
        dfs.write(row, n);
      }
    }
  });
  for (int64_t piece = 1; piece < pieces; ++piece) {
    for (int64_t i = 0; i < width; ++i) sums[i] += sums[piece * width + i];
  }
  const int64_t steps = p.steps, params = 2 * steps;
  for (int64_t k = 0; k < static_cast<int64_t>(totals.size()); ++k) {
    if (!totals[k].defined()) continue;
    const int64_t at = k < params ? 2 * (k % steps) + k / steps : k;  // gain and bias of a step stand together
    const T* from = reinterpret_cast<const T*>(sums + at * p.vectors());
    with_type(totals[k].scalar_type(), [&](auto tag) {
      auto* to = static_cast<decltype(tag)*>(totals[k].data_ptr());
      for (int64_t i = 0; i < totals[k].numel(); ++i) to[i] = pieces ? static_cast<decltype(tag)>(from[i]) : decltype(tag)(0);
    });
  }
}

}  // namespace rskip
