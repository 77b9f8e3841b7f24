// The kernels of rows.h over torch's tensors: any strides and floating types, in pieces for torch's threads.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
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
        const Tensor values = parameter.contiguous();
        with_type(values.scalar_type(), [&](auto tag) {
          const auto* from = static_cast<const decltype(tag)*>(values.const_data_ptr());
          for (int64_t i = 0; i < p.dim; ++i) to[i] = static_cast<T>(from[i]);
        });
        to += padded;
      }
      to = start + gains.size() * padded;
    }
    p.gains = memory.get();
    p.biases = p.gains + gains.size() * p.vectors();
  }
};

template <class T, int R>
std::vector<Slab<T, R>> slabs(const std::vector<Rows>& views, const Problem<T>& p) {
  std::vector<Slab<T, R>> made;
  for (const Rows& view : views) made.emplace_back(view, p);
  return made;
}

// `outputs` and `gradients` are those of the last step alone, or of every one.
template <class T, int NV, int R, bool RMS>
void forward_rows(const Problem<T>& p, const Rows& x, const Rows& f, const std::vector<Tensor>& outputs, int64_t count) {
  const int64_t groups = (count + R - 1) / R;
  const int64_t grain = std::max<int64_t>(1, kPiece / (R * p.dim));
  const std::vector<Rows> views(outputs.begin(), outputs.end());
  at::parallel_for(0, groups, grain, [&](int64_t begin, int64_t end) {
    Group<T, NV, R, RMS> group(p);
    Slab<T, R> xs(x, p), fs(f, p);
    auto ys = slabs<T, R>(views, p);
    std::vector<typename Lanes<T>::Vec*> pointers(p.steps);
    for (int64_t row = begin * R; row < std::min(end * R, count); row += R) {
      const int64_t n = std::min<int64_t>(R, count - row);
      for (size_t k = 0; k < ys.size(); ++k) pointers[p.steps - ys.size() + k] = ys[k].at(row, n);
      group.forward(xs.read(row, n), fs.read(row, n), pointers.data());
      for (auto& y : ys) y.write(row, n);
    }
  });
}

template <class T, int NV, int R, bool RMS>
void backward_rows(
    const Problem<T>& p, const Rows& x, const Rows& f, const std::vector<Tensor>& gradients, const Tensor& d_x,
    const Tensor& d_f, const std::vector<Tensor>& d_params, int64_t count) {
  using Vec = typename Lanes<T>::Vec;
  const int64_t groups = (count + R - 1) / R;
  const int64_t most = std::min(kMostPieces, std::max<int64_t>(1, count * p.dim / kPiece));
  const int64_t per_piece = std::max<int64_t>(1, (groups + most - 1) / most);
  const int64_t pieces = (groups + per_piece - 1) / per_piece;
  const int64_t width = 2 * p.steps * p.vectors();
  const Scratch<T> memory(pieces * width);
  Vec* const sums = memory.get();
  const std::vector<Rows> views(gradients.begin(), gradients.end());
  at::parallel_for(0, pieces, 1, [&](int64_t begin, int64_t end) {
    Group<T, NV, R, RMS> group(p);
    Slab<T, R> xs(x, p), fs(f, p), dxs(p), dfs(p);
    if (d_x.defined()) dxs = Slab<T, R>(Rows(d_x), p);
    if (d_f.defined()) dfs = Slab<T, R>(Rows(d_f), p);
    auto gs = slabs<T, R>(views, p);
    std::vector<const Vec*> pointers(p.steps);
    for (int64_t piece = begin; piece < end; ++piece) {
      Vec* const sum = sums + piece * width;
      clear<T>(sum, width);
      const int64_t last = std::min((piece + 1) * per_piece * R, count);
      for (int64_t row = piece * per_piece * R; row < last; row += R) {
        const int64_t n = std::min<int64_t>(R, count - row);
        for (size_t k = 0; k < gs.size(); ++k) pointers[p.steps - gs.size() + k] = gs[k].read(row, n);
        group.backward(xs.read(row, n), fs.read(row, n), pointers.data(), dxs.at(row, n), dfs.at(row, n), sum);
        dxs.write(row, n);
        dfs.write(row, n);
      }
    }
  });
  for (int64_t piece = 1; piece < pieces; ++piece) {
    for (int64_t i = 0; i < width; ++i) sums[i] += sums[piece * width + i];
  }
  const T* total = reinterpret_cast<const T*>(sums);
  for (size_t k = 0; k < d_params.size(); ++k) {  // gains', then biases'
    const int64_t step = k % p.steps, bias = k / p.steps;
    const T* from = total + (2 * step + bias) * p.vectors() * p.kLanes;
    with_type(d_params[k].scalar_type(), [&](auto tag) {
      auto* to = static_cast<decltype(tag)*>(d_params[k].data_ptr());
      for (int64_t i = 0; i < p.dim; ++i) to[i] = pieces ? static_cast<decltype(tag)>(from[i]) : decltype(tag)(0);
    });
  }
}

}  // namespace rskip
