// The recursive skip and its norms over rows of features, forward and backward:
//
//     z_1 = skip * x + branch * f,    y_k = norm(z_k) * gain_k + bias_k,    z_{k+1} = skip * x + y_k,    k = 1 ... steps
//
// where norm(z) = (z - mean) / sqrt(var + eps), or z / sqrt(mean(z^2) + eps) for RMSNorm. Plain C++ with the vector types
// of GCC and Clang; no torch. A group of rows stays in the first-level cache for all steps. Short rows are grouped, as
// many as a vector has lanes: one tree of additions then gives all their sums. What a row gives never depends on the
// others of its group, nor on its place there.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <utility>

namespace rskip {

constexpr int kBytes = 64;

template <class T>
struct Lanes;
template <>
struct Lanes<float> {
  typedef float Vec __attribute__((vector_size(kBytes), aligned(4), may_alias));
  typedef int32_t Mask __attribute__((vector_size(kBytes)));
};
template <>
struct Lanes<double> {
  typedef double Vec __attribute__((vector_size(kBytes), aligned(8), may_alias));
  typedef int64_t Mask __attribute__((vector_size(kBytes)));
};

// Uninitialised vectors, on a cache line's boundary.
template <class T>
class Scratch {
 public:
  using Vec = typename Lanes<T>::Vec;

  Scratch() = default;
  explicit Scratch(int64_t vectors)
      : data(static_cast<Vec*>(::operator new(sizeof(Vec) * vectors, std::align_val_t(kBytes)))) {}
  Scratch(Scratch&& other) noexcept : data(std::exchange(other.data, nullptr)) {}
  Scratch& operator=(Scratch&& other) noexcept {
    std::swap(data, other.data);
    return *this;
  }
  ~Scratch() { ::operator delete(data, std::align_val_t(kBytes)); }

  Vec* get() const { return data; }

 private:
  Vec* data = nullptr;
};

// Gains and biases are [steps][vectors of a row], zero beyond the row's end.
template <class T>
struct Problem {
  using Vec = typename Lanes<T>::Vec;
  static constexpr int kLanes = kBytes / sizeof(T);

  int64_t dim, steps;
  T skip, branch, eps;
  const Vec* gains;
  const Vec* biases;

  int64_t vectors() const { return (dim + kLanes - 1) / kLanes; }
};

#if defined(__clang__)
#define RSKIP_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define RSKIP_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Mask{__VA_ARGS__})
#endif

// Lane l: the sum of lanes l and l ^ S of a where bit S of l is 0, of b where it is 1.
template <int S, class Mask, class Vec, int... L>
inline Vec fold(Vec a, Vec b, std::integer_sequence<int, L...>) {
  constexpr int n = sizeof...(L);
  const Vec straight = RSKIP_SHUFFLE(a, b, (L & S ? L + n : L)...);
  const Vec crossed = RSKIP_SHUFFLE(a, b, (L & S ? (L ^ S) + n : L ^ S)...);
  return straight + crossed;
}

// R rows at a time (1, or as many as there are lanes), each of NV vectors (0: as many as the problem says).
template <class T, int NV, int R, bool RMS>
class Group {
 public:
  using P = Problem<T>;
  using Vec = typename P::Vec;
  using Mask = typename Lanes<T>::Mask;
  static constexpr int kLanes = P::kLanes;

  explicit Group(const P& problem)
      : p(problem),
        nv(NV ? NV : problem.vectors()),
        full(problem.dim / kLanes),
        size(R * nv),
        inverse(T(1) / T(problem.dim)),
        memory((problem.steps + 3) * size),
        factors((problem.steps * R + kLanes - 1) / kLanes) {
    for (int l = 0; l < kLanes; ++l) mask[l] = full * kLanes + l < p.dim ? -1 : 0;
  }

  // Fills outputs[k], R * nv vectors, with y_k; null: not wanted.
  void forward(const Vec* x, const Vec* f, Vec* const* outputs) {
    start(x, f);
    for (int64_t k = 0; k < p.steps; ++k) {
      statistics(k);
      Vec* const y = outputs[k];
      const auto normed = normalised(k);
      const auto affine = this->affine(k);
      if (k + 1 == p.steps) {
        each([=](int64_t i, int64_t v, int r) { y[i] = affine(normed(i, r), v); });
      } else if (y) {
        next(x, [=](int64_t i, int64_t v, int r) { return y[i] = affine(normed(i, r), v); });
      } else {
        next(x, [=](int64_t i, int64_t v, int r) { return affine(normed(i, r), v); });
      }
    }
  }

  // From gradients[k], that of y_k (null: none; never for the last), to those of x and f; adds those of gains and biases
  // to d_params, [steps][2][nv]. Each may be null. d_x or d_f may be the memory of the only gradient.
  void backward(const Vec* x, const Vec* f, const Vec* const* gradients, Vec* d_x, Vec* d_f, Vec* d_params) {
    start(x, f);
    for (int64_t k = 0; k < p.steps; ++k) {
      statistics(k);
      Vec* const n = kept(k);
      const auto normed = normalised(k);
      const auto affine = this->affine(k);
      if (k + 1 == p.steps) {
        each([=](int64_t i, int64_t, int r) { n[i] = normed(i, r); });
      } else {
        next(x, [=](int64_t i, int64_t v, int r) { return affine(n[i] = normed(i, r), v); });
      }
    }
    const Vec* g = gradients[p.steps - 1];
    for (int64_t k = p.steps - 1; k >= 0; --k) {
      if (d_params) add_params(k, g, d_params + 2 * k * nv);
      step_back(k, g, d_x, d_f);
      g = upstream();
      if (k > 0 && gradients[k - 1]) {
        each([to = upstream(), from = gradients[k - 1]](int64_t i, int64_t, int) { to[i] += from[i]; });
      }
    }
  }

 private:
  template <class F>
  __attribute__((always_inline)) void each(F f) {
    for (int r = 0; r < R; ++r)
      for (int64_t v = 0; v < nv; ++v) f(r * nv + v, v, r);
  }

  // out[n][r] = the sum of row r's terms, the n-th of the N that `terms(i, v, r, Vec[N])` gives
  template <int N, class F>
  __attribute__((always_inline)) void sum(F terms, T (*out)[R]) {
    if constexpr (R == 1) {
      constexpr int U = 4;  // independent sums, for the additions' latency
      Vec parts[U][N] = {}, t[N];
      int64_t v = 0;
      for (; v + U <= full; v += U)
        for (int u = 0; u < U; ++u) {
          terms(v + u, v + u, 0, t);
          for (int n = 0; n < N; ++n) parts[u][n] += t[n];
        }
      for (; v < full; ++v) {
        terms(v, v, 0, t);
        for (int n = 0; n < N; ++n) parts[0][n] += t[n];
      }
      if (v < nv) {
        terms(v, v, 0, t);
        for (int n = 0; n < N; ++n) parts[1][n] += masked(t[n]);
      }
      for (int n = 0; n < N; ++n) out[n][0] = across((parts[0][n] + parts[1][n]) + (parts[2][n] + parts[3][n]));
    } else {
      Vec rows[N][R], t[N];
      for (int r = 0; r < R; ++r) {
        for (int n = 0; n < N; ++n) rows[n][r] = Vec{};
        for (int64_t v = 0; v < nv; ++v) {
          terms(r * nv + v, v, r, t);
          for (int n = 0; n < N; ++n) rows[n][r] += v < full ? t[n] : masked(t[n]);
        }
      }
      for (int n = 0; n < N; ++n) tree(rows[n], out[n]);
    }
  }

  Vec masked(Vec value) const { return (Vec)((Mask)value & mask); }

  static T across(Vec a) {
    constexpr std::make_integer_sequence<int, kLanes> lanes;
    if constexpr (kLanes == 16) a += swapped<8>(a, lanes);
    a += swapped<4>(a, lanes);
    a += swapped<2>(a, lanes);
    a += swapped<1>(a, lanes);
    return a[0];
  }

  template <int S, int... L>
  static Vec swapped(Vec a, std::integer_sequence<int, L...>) {
    return RSKIP_SHUFFLE(a, a, (L ^ S)...);
  }

  static __attribute__((always_inline)) void tree(Vec (&rows)[R], T* out) {
    static_assert(R == kLanes, "");
    constexpr std::make_integer_sequence<int, R> lanes;
    for (int r = 0; r < R; r += 2) rows[r] = fold<1, Mask>(rows[r], rows[r + 1], lanes);
    for (int r = 0; r < R; r += 4) rows[r] = fold<2, Mask>(rows[r], rows[r + 2], lanes);
    for (int r = 0; r < R; r += 8) rows[r] = fold<4, Mask>(rows[r], rows[r + 4], lanes);
    if constexpr (R == 16) rows[0] = fold<8, Mask>(rows[0], rows[8], lanes);
    memcpy(out, rows, sizeof(Vec));
  }

  // Loops read members through copies: the compiler must assume that a store to a row may change a member.
  Vec* upstream() const { return memory.get(); }
  Vec* total() const { return upstream() + size; }
  Vec* kept(int64_t k) const { return upstream() + (2 + k) * size; }
  Vec* summed() const { return kept(p.steps); }
  T* scale(int64_t k) const { return reinterpret_cast<T*>(factors.get()) + k * R; }

  void start(const Vec* x, const Vec* f) {
    Vec* const z = summed();
    const T skip = p.skip, branch = p.branch;
    sum<1>([=](int64_t i, int64_t, int, Vec* t) { *t = z[i] = skip * x[i] + branch * f[i]; }, sums);
  }

  // z of the next step, from y of this one
  template <class F>
  __attribute__((always_inline)) void next(const Vec* x, F y) {
    Vec* const z = summed();
    const T skip = p.skip;
    sum<1>([=](int64_t i, int64_t v, int r, Vec* t) { *t = z[i] = skip * x[i] + y(i, v, r); }, sums);
  }

  // mean and 1 / sqrt(var + eps), from `sums` and z: in two passes, since E[z^2] - mean^2 loses digits
  void statistics(int64_t k) {
    T squares[1][R];
    for (int r = 0; r < R; ++r) mean[r] = sums[0][r] * inverse;
    const Vec* const z = summed();
    const Means means(mean);
    sum<1>([=](int64_t i, int64_t, int r, Vec* t) {
      const Vec d = RMS ? z[i] : z[i] - means[r];
      *t = d * d;
    }, squares);
    T* const to = scale(k);
    for (int r = 0; r < R; ++r) to[r] = T(1) / std::sqrt(squares[0][r] * inverse + p.eps);
  }

  // R numbers: one in a register, more where they are
  struct Means {
    explicit Means(const T* from) : one(from[0]), many(from) {}
    T operator[](int r) const { return R == 1 ? one : many[r]; }
    T one;
    const T* many;
  };

  auto normalised(int64_t k) const {
    const Vec* const z = summed();
    const Means means(mean), scales(scale(k));
    return [=](int64_t i, int r) -> Vec { return (RMS ? z[i] : z[i] - means[r]) * scales[r]; };
  }

  auto affine(int64_t k) const {
    const Vec *const gain = p.gains + k * nv, *const bias = p.biases + k * nv;
    return [=](Vec n, int64_t v) -> Vec { return n * gain[v] + bias[v]; };
  }

  void add_params(int64_t k, const Vec* g, Vec* d_params) {
    const Vec* const n = kept(k);
    const int64_t nv = this->nv, size = this->size;
    for (int64_t v = 0; v < nv; ++v) {
      Vec gain = d_params[v], bias = d_params[nv + v];
      for (int64_t i = v; i < size; i += nv) {
        gain += g[i] * n[i];
        bias += g[i];
      }
      d_params[v] = gain;
      d_params[nv + v] = bias;
    }
  }

  void step_back(int64_t k, const Vec* g, Vec* d_x, Vec* d_f) {
    const Vec *const gain = p.gains + k * nv, *const n = kept(k);
    T sums[2][R];
    sum<2>([=](int64_t i, int64_t v, int, Vec* t) {
      t[0] = g[i] * gain[v];
      t[1] = t[0] * n[i];
    }, sums);
    for (int r = 0; r < R; ++r) {
      sums[0][r] *= inverse;
      sums[1][r] *= inverse;
    }
    const Means means(sums[0]), slopes(sums[1]), scales(scale(k));
    const auto gradient = [=](int64_t i, int64_t v, int r) -> Vec {
      const Vec d = g[i] * gain[v] - n[i] * slopes[r];
      return (RMS ? d : d - means[r]) * scales[r];
    };
    const bool last = k + 1 == p.steps;
    Vec *const passed = upstream(), *const total = this->total();
    if (k > 0) {
      each([=](int64_t i, int64_t v, int r) {
        const Vec d = passed[i] = gradient(i, v, r);
        total[i] = last ? d : total[i] + d;
      });
    } else {
      const T skip = p.skip, branch = p.branch;
      each([=](int64_t i, int64_t v, int r) {
        const Vec d = gradient(i, v, r);
        if (d_x) d_x[i] = skip * (last ? d : total[i] + d);
        if (d_f) d_f[i] = branch * d;
      });
    }
  }

  const P& p;
  const int64_t nv, full, size;
  const T inverse;
  Scratch<T> memory, factors;
  Mask mask;
  T sums[1][R], mean[R];
};

}  // namespace rskip
