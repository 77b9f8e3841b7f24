// The recursive skip and its norms over rows of features, forward and backward:
//
//     z_1 = skip * x + branch * f,    y_k = norm(z_k) * gain_k + bias_k,    z_{k+1} = skip * x + y_k,    k = 1 ... steps
//
// where norm(z) = (z - mean) / sqrt(var + eps), or z / sqrt(mean(z^2) + eps) for RMSNorm, and sum_k p_k y_k. Plain C++ with
// the vector types of GCC and Clang; no torch. A group of rows stays in the first-level cache for all steps, and one tree of
// additions gives all its rows' sums: their latencies, not arithmetic, would otherwise take most of the time. What a row
// gives never depends on the others of its group, nor on its place there.

#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <type_traits>
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

// R rows at a time (a power of 2, at most as many as there are lanes), each of NV vectors (0: as many as the problem
// says). Rows are R * nv vectors, zero beyond each row's end, and so are z and y then: only the squares of deviations
// need a mask. Numbers of rows stand in the lanes of a vector: row r's in lane r. What the next group will read and write is
// asked for ahead, since memory's latency would show between groups.
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
        size(R * nv),
        inverse(T(1) / T(problem.dim)),
        memory((problem.steps + 2) * size),
        numbers(4 * problem.steps + 3) {
    for (int l = 0; l < kLanes; ++l) mask[l] = (nv - 1) * kLanes + l < p.dim ? -1 : 0;
  }

  // Fills y with the last step's y_k.
  void forward(const Vec* x, const Vec* f, Vec* y) {
    recompute(x, f);
    each([y, step = at(p.steps - 1), ahead = size](int64_t i, int64_t v, int r) {
      __builtin_prefetch(y + i + ahead, 1);
      y[i] = step.y(i, v, r);
    });
  }

  // From g, the gradient of y, to those of x and f; adds those of gains and biases to d_params, [steps][2][nv]. d_x or d_f
  // may be the memory of g.
  void backward(const Vec* x, const Vec* f, const Vec* g, Vec* d_x, Vec* d_f, Vec* d_params) {
    recompute(x, f);
    const auto upstream = [g, ahead = size](int64_t i, int64_t, int) {
      __builtin_prefetch(g + i + ahead);
      return g[i];
    };
    descend(g, upstream, [](int64_t) { return [](Vec d, int64_t, int64_t, int) { return d; }; }, d_x, d_f, d_params);
  }

  // Fills y with sum_k p_k y_k. The p of each step, a number for each row, stand in `weights`: set before, or here where
  // rows halt by themselves: h_k = sigmoid(direction . y_k + halt[k]), p_k = h_k prod_{j<k} (1 - h_j), the last the rest.
  void mix(const Vec* x, const Vec* f, const Vec* direction, const T* halt, Vec* y) {
    recompute(x, f);
    if (direction) {
      Vec going_on = Vec{} + T(1);
      for (int64_t k = 0; k + 1 < p.steps; ++k) {
        Vec halts = sum([=, step = at(k)](int64_t i, int64_t v, int r) { return direction[v] * step.y(i, v, r); }) + halt[k];
        T* const one = reinterpret_cast<T*>(&halts);
        for (int r = 0; r < R; ++r) one[r] = T(1) / (T(1) + std::exp(-one[r]));
        *weights(k) = going_on * halts;
        going_on *= T(1) - halts;
      }
      *weights(p.steps - 1) = going_on;
    }
    for (int64_t k = 0; k < p.steps; ++k) {
      const Step step = at(k);
      const Numbers weight = number(of_weights(k));
      if (k == 0) each([=](int64_t i, int64_t v, int r) { y[i] = weight[r] * step.y(i, v, r); });
      else each([=](int64_t i, int64_t v, int r) { y[i] += weight[r] * step.y(i, v, r); });
    }
  }

  // The same from g, the gradient of sum_k p_k y_k, with the p in `weights`; `slopes` has the gradients that reach p
  // otherwise, and then, of each row, those of p, or of halt where there is a direction, whose own is added to d_direction.
  void mix_backward(
      const Vec* x, const Vec* f, const Vec* g, const Vec* direction, Vec* d_x, Vec* d_f, Vec* d_params, Vec* d_direction) {
    recompute(x, f);
    const int64_t last = p.steps - 1;
    for (int64_t k = 0; k <= last; ++k)
      *slopes(k) += sum([=, step = at(k)](int64_t i, int64_t v, int r) { return g[i] * step.y(i, v, r); });
    if (direction) halt_slopes();
    for (int64_t k = 0; direction && k < last; ++k) {
      const Numbers slope = number(of_slopes(k));
      each([=, step = at(k)](int64_t i, int64_t v, int r) { d_direction[v] += slope[r] * step.y(i, v, r); });
    }
    Vec* const up = z(p.steps);
    const auto upstream = [=, weight = number(of_weights(last))](int64_t i, int64_t, int r) { return up[i] = weight[r] * g[i]; };
    const auto more = [=](int64_t k) {
      return [=, weight = number(of_weights(k)), slope = number(of_slopes(k))](Vec d, int64_t i, int64_t v, int r) {
        d += weight[r] * g[i];
        return direction ? d + slope[r] * direction[v] : d;
      };
    };
    descend(up, upstream, more, d_x, d_f, d_params);
  }

  // Step k's p and their gradients, row r's in lane r.
  Vec* weights(int64_t k) { return numbers.get() + of_weights(k); }
  Vec* slopes(int64_t k) { return numbers.get() + of_slopes(k); }

 private:
  static constexpr int kBlock = R < 4 ? R : 4;  // rows whose sums are in registers at once
  static constexpr int kUnroll = 4 / kBlock;

  // One for each row. Copies, or every use would load it again, since a store to a row might have changed it; not of short
  // rows, which use a number a few times at most.
  using Numbers = std::conditional_t<NV != 0, const T*, std::array<T, R>>;

  // A step's rows, normalised and with its gain and bias.
  struct Step {
    const Vec *z, *gain, *bias;
    Numbers scale, mean;

    Vec normed(int64_t i, int r) const { return (RMS ? z[i] : z[i] - mean[r]) * scale[r]; }
    Vec y(int64_t i, int64_t v, int r) const { return normed(i, r) * gain[v] + bias[v]; }
  };

  Step at(int64_t k) const {
    return {z(k), p.gains + k * nv, p.biases + k * nv, number(2 * k), number(2 * k + 1)};
  }

  Vec* z(int64_t k) const { return memory.get() + k * size; }

  Numbers number(int64_t k) const {
    const T* const from = reinterpret_cast<const T*>(numbers.get() + k);
    if constexpr (std::is_pointer_v<Numbers>) {
      return from;
    } else {
      Numbers copies;
      memcpy(&copies, from, sizeof copies);
      return copies;
    }
  }

  template <class F>
  __attribute__((always_inline)) void each(F f) const {
    for (int r = 0; r < R; ++r)
      for (int64_t v = 0; v < nv; ++v) f(r * nv + v, v, r);
  }

  // where in `numbers`
  int64_t of_weights(int64_t k) const { return 2 * p.steps + 3 + k; }
  int64_t of_slopes(int64_t k) const { return 3 * p.steps + 3 + k; }

  // From the gradients of p to those of halt: dp_k/dhalt_k = p_k (1 - h_k), dp_j/dhalt_k = -p_j h_k for j > k, with h_k
  // what p_k is of it and all later ones.
  void halt_slopes() {
    T* const weight = reinterpret_cast<T*>(weights(0));
    T* const slope = reinterpret_cast<T*>(slopes(0));
    for (int r = 0; r < R; ++r) {
      T later = 0, rest = 0;
      for (int64_t at = (p.steps - 1) * kLanes + r; at >= 0; at -= kLanes) {
        const T w = weight[at], d = slope[at], whole = rest + w;
        slope[at] = whole == 0 ? 0 : w * (rest * d - later) / whole;
        later += w * d;
        rest = whole;
      }
    }
  }

  // From g, the gradient of the last y_k as `upstream` gives it for the first time, back through all steps; `more(k)` adds
  // to what reaches y_k from behind what reaches it otherwise.
  template <class First, class More>
  __attribute__((always_inline)) void descend(const Vec* g, First upstream, More more, Vec* d_x, Vec* d_f, Vec* d_params) {
    const int64_t last = p.steps - 1;
    Vec *const up = z(p.steps), *const total = z(p.steps + 1);
    gather(last, d_params, upstream);
    for (int64_t k = last; k > 0; --k) {
      const auto derivative = this->derivative(k, g);
      const auto whole = more(k - 1);
      if (k == last) {
        gather(k - 1, d_params, [=](int64_t i, int64_t v, int r) {
          const Vec d = total[i] = derivative(i, v, r);
          return up[i] = whole(d, i, v, r);
        });
      } else {
        gather(k - 1, d_params, [=](int64_t i, int64_t v, int r) {
          const Vec d = derivative(i, v, r);
          total[i] += d;
          return up[i] = whole(d, i, v, r);
        });
      }
      g = up;
    }
    const auto derivative = this->derivative(0, g);
    const T skip = p.skip, branch = p.branch;
    const bool alone = last == 0;
    each([=, ahead = size](int64_t i, int64_t v, int r) {
      __builtin_prefetch(d_x + i + ahead, 1);
      __builtin_prefetch(d_f + i + ahead, 1);
      const Vec d = derivative(i, v, r);
      d_x[i] = skip * (alone ? d : total[i] + d);
      d_f[i] = branch * d;
    });
  }

  // z of every step, with its scale 1 / sqrt(var + eps) and mean
  void recompute(const Vec* x, const Vec* f) {
    const T skip = p.skip, branch = p.branch;
    Vec sums = sum([=, z = z(0), ahead = size](int64_t i, int64_t, int) {
      __builtin_prefetch(x + i + ahead);
      __builtin_prefetch(f + i + ahead);
      return z[i] = skip * x[i] + branch * f[i];
    });
    for (int64_t k = 0;; ++k) {
      moments(k, sums);
      if (k + 1 == p.steps) return;
      Vec* const next = z(k + 1);
      const Step step = at(k);
      sums = sum([=](int64_t i, int64_t v, int r) { return next[i] = skip * x[i] + step.y(i, v, r); });
    }
  }

  // in two passes, since E[z^2] - mean^2 loses digits
  void moments(int64_t k, Vec sums) {
    const Vec mean = sums * inverse;
    numbers.get()[2 * k + 1] = mean;
    const Vec* const z = this->z(k);
    const Numbers means = number(2 * k + 1);
    const Vec squares = sum([=, last = nv - 1](int64_t i, int64_t v, int r) {
      Vec d = RMS ? z[i] : z[i] - means[r];
      if (!RMS && v == last) d = (Vec)((Mask)d & mask);
      return d * d;
    });
    Vec scale = squares * inverse + p.eps;
    T* const one = reinterpret_cast<T*>(&scale);
    for (int r = 0; r < R; ++r) one[r] = T(1) / std::sqrt(one[r]);
    numbers.get()[2 * k] = scale;
  }

  // Adds the gradients of step k's gain and bias, and readies derivative(k): `upstream` gives its y's gradient.
  template <class F>
  __attribute__((always_inline)) void gather(int64_t k, Vec* d_params, F upstream) {
    const Step step = at(k);
    Vec *const d_gain = d_params + 2 * k * nv, *const d_bias = d_gain + nv;
    Vec first[R], second[R];
    for (int block = 0; block < R; block += kBlock) {
      Vec a[kBlock] = {}, b[kBlock] = {};
      for (int64_t v = 0; v < nv; ++v) {
        Vec of_gain = {}, of_bias = {};
        for (int r = 0; r < kBlock; ++r) {
          const int64_t i = (block + r) * nv + v;
          const Vec g = upstream(i, v, block + r), n = step.normed(i, block + r), t = g * step.gain[v];
          a[r] += t;
          b[r] += t * n;
          of_gain += g * n;
          of_bias += g;
        }
        d_gain[v] += of_gain;
        d_bias[v] += of_bias;
      }
      for (int r = 0; r < kBlock; ++r) {
        first[block + r] = a[r];
        second[block + r] = b[r];
      }
    }
    const Vec scale = numbers.get()[2 * k];
    Vec* const to = numbers.get() + 2 * p.steps;
    to[0] = scale;
    to[1] = tree(second) * -inverse * scale * scale;
    if (!RMS) to[2] = tree(first) * -inverse * scale;
  }

  // scale * (t - mean(t) - n * mean(t * n)), t = g * gain: the gradient of z_k from g, that of y_k; after gather(k)
  auto derivative(int64_t k, const Vec* g) const {
    const Step step = at(k);
    const int64_t n = 2 * p.steps;
    const Numbers of_t = number(n), of_z = number(n + 1), rest = number(n + 2);
    return [=](int64_t i, int64_t v, int r) -> Vec {
      const Vec t = g[i] * step.gain[v] * of_t[r];
      return RMS ? t + step.z[i] * of_z[r] : t + (step.z[i] - step.mean[r]) * of_z[r] + rest[r];
    };
  }

  // the sum over each row of what `terms` gives
  template <class F>
  __attribute__((always_inline)) Vec sum(F terms) const {
    Vec rows[R];
    for (int block = 0; block < R; block += kBlock) {
      Vec parts[kUnroll][kBlock] = {};
      int64_t v = 0;
      for (; v + kUnroll <= nv; v += kUnroll)
        for (int u = 0; u < kUnroll; ++u)
          for (int r = 0; r < kBlock; ++r) parts[u][r] += terms((block + r) * nv + v + u, v + u, block + r);
      for (; v < nv; ++v)
        for (int r = 0; r < kBlock; ++r) parts[0][r] += terms((block + r) * nv + v, v, block + r);
      for (int r = 0; r < kBlock; ++r) {
        rows[block + r] = parts[0][r];
        for (int u = 1; u < kUnroll; ++u) rows[block + r] += parts[u][r];
      }
    }
    return tree(rows);
  }

  // lane l: the sum of the lanes of what rows[l % R] was
  static __attribute__((always_inline)) Vec tree(Vec (&rows)[R]) {
    folds<1>(rows);
    return rows[0];
  }

  template <int S>
  static __attribute__((always_inline)) void folds(Vec (&rows)[R]) {
    constexpr std::make_integer_sequence<int, kLanes> lanes;
    if constexpr (S < R) {
      for (int r = 0; r < R; r += 2 * S) rows[r] = fold<S, Mask>(rows[r], rows[r + S], lanes);
    } else {
      rows[0] += swapped<S>(rows[0], lanes);
    }
    if constexpr (2 * S < kLanes) folds<2 * S>(rows);
  }

  template <int S, int... L>
  static Vec swapped(Vec a, std::integer_sequence<int, L...>) {
    return RSKIP_SHUFFLE(a, a, (L ^ S)...);
  }

  const P& p;
  const int64_t nv, size;
  const T inverse;
  Scratch<T> memory, numbers;
  Mask mask;
};

}  // namespace rskip
