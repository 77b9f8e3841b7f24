// The recursive skip and its norms over rows of features, forward and backward:
//
//     z_1 = skip * x + branch * f,    y_k = n_k * gain_k + bias_k,    z_{k+1} = skip * x + y_k,    k = 1 ... steps
//
// where n = (z - mean) / sqrt(var + eps), or z / sqrt(mean(z^2) + eps) for RMSNorm, and sum_k p_k y_k. Plain C++ with the
// vector types of GCC and Clang, as wide as the instruction set's own; no torch. A group of rows stays in the first-level
// cache for all steps, and one tree of additions gives the sums of all its rows: their latency would otherwise take most
// of the time. What a row gives never depends on the other rows of its group, nor on its place there.

#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

namespace rskip {

#if defined(__AVX512F__)
constexpr int kBytes = 64;
#elif defined(__AVX__)
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;  // SSE, NEON
#endif

constexpr int kLanes = kBytes / sizeof(float);
typedef float Vec __attribute__((vector_size(kBytes), aligned(alignof(float)), may_alias));
typedef int32_t Mask __attribute__((vector_size(kBytes)));

struct Moments {
  float scale, mean;  // 1 / sqrt(var + eps), and the mean
};

// Rows are whole vectors of every instruction set: `dim` is a multiple of 16.
struct Problem {
  int64_t dim, steps;
  float skip, branch, eps;
  bool rms;
  std::vector<const Vec*> gains, biases;
  Moments (*overflowed)(const float* row, int64_t dim, float eps);  // of a row whose variance is infinite in float32
};

#if defined(__clang__)
#define RSKIP_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define RSKIP_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Mask{__VA_ARGS__})
#endif
#define RSKIP_INLINE __attribute__((always_inline))
#define RSKIP_APART __attribute__((noinline))  // mixtures and overflow, which otherwise cost the rest its registers

// Lane l: the sum of lanes l and l ^ S of a where bit S of l is 0, of b where it is 1.
template <int S, int... L>
inline RSKIP_INLINE Vec fold(Vec a, Vec b, std::integer_sequence<int, L...>) {
  constexpr int n = sizeof...(L);
  const Vec straight = RSKIP_SHUFFLE(a, b, (L & S ? L + n : L)...);
  const Vec crossed = RSKIP_SHUFFLE(a, b, (L & S ? (L ^ S) + n : L ^ S)...);
  return straight + crossed;
}

// R rows at a time (a power of 2, at most as many as there are lanes), each of NV vectors (0: as many as the problem
// says). A number of each row is in a vector: row r's in lane r.
template <int NV, int R>
struct Group {
  explicit Group(const Problem& problem) : p(problem) {}

  // Fills y with the last step's y_k, and the moments.
  void forward(const Vec* x, const Vec* f, Vec* y) {
    measure(x, f, y);
    each([=, step = at(p.steps - 1), other = p.steps > 1 ? y : f](int64_t i, int64_t v, int r) {
      prefetch(other + i);
      prefetch(y + i);
      y[i] = step.y(step.normed(y[i], r), v);
    });
  }

  // From g, the gradient of y, to those of x and f, with forward's moments; adds those of gains and biases to d_params,
  // [steps][2][nv].
  void backward(const Vec* x, const Vec* f, const Vec* g, Vec* d_x, Vec* d_f, Vec* d_params) {
    const auto upstream = [=](int64_t i, int64_t, int) {
      prefetch(g + i);
      return g[i];
    };
    const int64_t last = p.steps - 1;
    if (p.steps == 2) {
      sum_gradients(last, d_params, upstream, computed_n(x, f));
    } else {
      normalise(x, f);
      sum_gradients(last, d_params, upstream, stored_n(last));
    }
    const auto no_mixture = [](int64_t) { return [](Vec d, int64_t, int64_t, int) { return d; }; };
    backward_steps(g, no_mixture, d_x, d_x, d_f, d_params);
  }

  // Fills y with sum_k p_k y_k. `weights` holds the p of each step: set before, or here where rows halt by themselves:
  // h_k = sigmoid(direction . y_k + halt[k]), p_k = h_k prod_{j<k} (1 - h_j), the last the rest.
  RSKIP_APART void mix(const Vec* x, const Vec* f, const Vec* direction, const float* halt, Vec* y) {
    measure(x, f, y);
    normalise(x, f);
    if (direction) halting_weights(direction, halt);
    for (int64_t k = 0; k < p.steps; ++k) {
      each([=, step = at(k), weight = number(weights + k)](int64_t i, int64_t v, int r) {
        y[i] = (k > 0 ? y[i] : Vec{}) + weight[r] * step.y(v, i);
      });
    }
  }

  // The same from g, the gradient of sum_k p_k y_k, with the p in `weights`; `slopes` has the gradients that reach p
  // otherwise, and then, of each row, those of p, or of halt where there is a direction, whose own is added to d_direction.
  RSKIP_APART void mix_backward(
      const Vec* x, const Vec* f, const Vec* g, const Vec* direction, Vec* d_x, Vec* d_f, Vec* d_params, Vec* d_direction) {
    measure(x, f, memory + p.steps * size);
    normalise(x, f);
    const int64_t last = p.steps - 1;
    for (int64_t k = 0; k <= last; ++k) {
      slopes[k] += sum([=, step = at(k)](int64_t i, int64_t v, int) { return g[i] * step.y(v, i); });
    }
    if (direction) {
      halt_slopes();
      for (int64_t k = 0; k < last; ++k) {
        each([=, step = at(k), slope = number(slopes + k)](int64_t i, int64_t v, int r) {
          d_direction[v] += slope[r] * step.y(v, i);
        });
      }
    }
    const auto upstream = [=, weight = number(weights + last)](int64_t i, int64_t, int r) {
      return d_f[i] = weight[r] * g[i];
    };
    const auto from_mixture = [=](int64_t k) {
      return [=, weight = number(weights + k), slope = number(slopes + k)](Vec d, int64_t i, int64_t v, int r) {
        d += weight[r] * g[i];
        return direction ? d + slope[r] * direction[v] : d;
      };
    };
    sum_gradients(last, d_params, upstream, stored_n(last));
    backward_steps(d_f, from_mixture, d_f, d_x, d_f, d_params);
  }

  // `count` numbers of each of these rows, from or to columns of a matrix whose rows are `stride` apart.
  static void load(Vec* to, const float* from, int64_t count, int64_t stride) {
    for (int64_t k = 0; k < count; ++k) memcpy(to + k, from + k * stride, R * sizeof(float));
  }
  void fill(Vec* to, const float* from) const {  // the same of each row
    for (int64_t k = 0; k < p.steps; ++k) to[k] = Vec{} + from[k];
  }
  static void save(const Vec* from, float* to, int64_t count, int64_t stride) {
    for (int64_t k = 0; k < count; ++k) memcpy(to + k * stride, from + k, R * sizeof(float));
  }

  struct alignas(64) Line { Vec vector; };
  static constexpr int kBlock = R < 4 ? R : 4;  // rows whose sums are in registers at once
  static constexpr int kUnroll = NV ? 1 : 4;  // not of R, on which a row's bits must not depend

  // A number of each row. Of long rows it is copied to registers, since a store to a row might change what is in memory,
  // so that every use would load it again; short rows use a number a few times at most and read memory.
  using Numbers = std::conditional_t<NV != 0, const float*, std::array<float, R>>;

  struct Step {
    const Vec *n, *gain, *bias;
    Numbers scale, mean;

    Vec normed(Vec z, int r) const { return (z - mean[r]) * scale[r]; }
    Vec y(Vec normed, int64_t v) const { return normed * gain[v] + bias[v]; }
    Vec y(int64_t v, int64_t i) const { return y(n[i], v); }
  };

  Step at(int64_t k) const {
    return {memory + k * size, p.gains[k], p.biases[k], number(moments + 2 * k), number(moments + 2 * k + 1)};
  }

  static Numbers number(const Vec* from) {
    const float* const first = reinterpret_cast<const float*>(from);
    if constexpr (std::is_pointer_v<Numbers>) return first;
    else {
      Numbers copies;
      memcpy(&copies, first, sizeof copies);
      return copies;
    }
  }

  // Fetches what the group after the next one needs, into the second-level cache: the first has no room. Also lines to be
  // written are fetched as if to read: for writing they would come into the first. A pass asks for few tensors, or
  // requests queue (so with one step the last pass asks for f). Rows of one cache line the processor fetches by itself.
  RSKIP_INLINE void prefetch(const Vec* here) const {
    if constexpr (NV * kBytes != 64) __builtin_prefetch(here + 2 * size, 0, 2);
  }

  template <class F>
  RSKIP_INLINE void each(F f) const {
    for (int r = 0; r < R; ++r)
      for (int64_t v = 0; v < nv; ++v) f(r * nv + v, v, r);
  }

  // The moments of every step; leaves the last z in `z`.
  void measure(const Vec* x, const Vec* f, Vec* z) {
    const float skip = p.skip, branch = p.branch;
    Vec sums = sum([=](int64_t i, int64_t, int) {
      return z[i] = skip * x[i] + branch * f[i];
    });
    for (int64_t k = 0;; ++k) {
      take_moments(k, sums, z, k > 0 ? f : x);
      if (k + 1 == p.steps) return;
      sums = sum([=, step = at(k)](int64_t i, int64_t v, int r) {
        const Vec y = step.y(step.normed(z[i], r), v);
        return z[i] = skip * x[i] + y;
      });
    }
  }

  // Step k's moments from the sums of z: the mean first, since E[z^2] - mean^2 loses digits. Fetches `next` meanwhile.
  void take_moments(int64_t k, Vec sums, const Vec* z, const Vec* next) {
    moments[2 * k + 1] = p.rms ? Vec{} : sums * inverse;
    const Numbers means = number(moments + 2 * k + 1);
    const Vec squares = sum([=](int64_t i, int64_t, int r) {
      prefetch(next + i);
      const Vec d = z[i] - means[r];
      return d * d;
    });
    Vec scale = squares * inverse + p.eps;
    float* const one = reinterpret_cast<float*>(&scale);
    for (int r = 0; r < R; ++r) one[r] = 1.0f / std::sqrt(one[r]);
    moments[2 * k] = scale;
    correct_overflow(k, z);
  }

  // Asks torch for step k's moments of those rows z whose variance overflowed, and whose scale is 0 therefore: infinite
  // values must not look finite.
  RSKIP_APART void correct_overflow(int64_t k, const Vec* z) {
    if (p.rms) return;
    float* const scales = reinterpret_cast<float*>(moments + 2 * k);
    float* const means = reinterpret_cast<float*>(moments + 2 * k + 1);
    for (int r = 0; r < R; ++r) {
      if (__builtin_expect(scales[r] != 0.0f, true)) continue;
      const Moments moments_of_row = p.overflowed(reinterpret_cast<const float*>(z + r * nv), p.dim, p.eps);
      scales[r] = moments_of_row.scale;
      means[r] = moments_of_row.mean;
    }
  }

  // n of every step from the moments
  void normalise(const Vec* x, const Vec* f) {
    const float skip = p.skip, branch = p.branch;
    Vec* to = memory;
    each([=, step = at(0)](int64_t i, int64_t, int r) {
      prefetch(x + i);
      prefetch(f + i);
      to[i] = step.normed(skip * x[i] + branch * f[i], r);
    });
    for (int64_t k = 1; k < p.steps; ++k) {
      to += size;
      each([=, before = at(k - 1), step = at(k)](int64_t i, int64_t v, int r) {
        const Vec y = before.y(v, i);
        to[i] = step.normed(skip * x[i] + y, r);
      });
    }
  }

  // The p of rows that halt by themselves, as `mix` says.
  RSKIP_INLINE void halting_weights(const Vec* direction, const float* halt) {
    Vec left = Vec{} + 1.0f;
    for (int64_t k = 0; k + 1 < p.steps; ++k) {
      const Vec projections = sum([=, step = at(k)](int64_t i, int64_t v, int) { return direction[v] * step.y(v, i); });
      Vec halting = projections + halt[k];
      for (int r = 0; r < R; ++r) halting[r] = 1.0f / (1.0f + std::exp(-halting[r]));
      weights[k] = left * halting;
      left *= 1.0f - halting;
    }
    weights[p.steps - 1] = left;
  }

  // From the gradients of p to those of halt: dp_k/dhalt_k = p_k (1 - h_k), dp_j/dhalt_k = -p_j h_k for j > k, with h_k
  // what p_k is of it and all later ones.
  void halt_slopes() {
    float *const weight = reinterpret_cast<float*>(weights), *const slope = reinterpret_cast<float*>(slopes);
    for (int r = 0; r < R; ++r) {
      float later = 0, rest = 0;
      for (int64_t k = p.steps - 1; k >= 0; --k) {
        const int64_t index = k * kLanes + r;
        const float w = weight[index], d = slope[index];
        const float remaining = rest + w;  // prod_{j<k} (1 - h_j)
        slope[index] = remaining == 0 ? 0 : w * (rest * d - later) / remaining;
        later += w * d;
        rest = remaining;
      }
    }
  }

  // From g, the gradient of the last y_k, after sum_gradients of the last step, back through all steps. y_k reaches the
  // result through z_{k+1}, and in a mixture also by itself: `from_mixture(k)` adds that. d_x collects the gradients of the
  // z_k. d_f holds the gradient of each y_k in its turn, but for that of the last y_k but one, which is in `below_last`:
  // without a mixture it is that of the last z_k, which d_x holds then.
  template <class FromMixture>
  RSKIP_INLINE void backward_steps(
      const Vec* g, FromMixture from_mixture, Vec* below_last, Vec* d_x, Vec* d_f, Vec* d_params) {
    const int64_t last = p.steps - 1;
    if (last > 0) {
      const auto d_z = derivative(last, g);
      const auto whole = from_mixture(last - 1);
      const auto upstream = [=](int64_t i, int64_t v, int r) {
        const Vec d = d_x[i] = d_z(i, v, r);
        return below_last == d_x ? d : below_last[i] = whole(d, i, v, r);
      };
      sum_gradients(last - 1, d_params, upstream, stored_n(last - 1));
      g = below_last;
    }
    for (int64_t k = last - 1; k > 0; --k) {
      const auto d_z = derivative(k, g);
      const auto whole = from_mixture(k - 1);
      const auto upstream = [=](int64_t i, int64_t v, int r) {
        const Vec d = d_z(i, v, r);
        d_x[i] += d;
        return d_f[i] = whole(d, i, v, r);
      };
      sum_gradients(k - 1, d_params, upstream, stored_n(k - 1));
      g = d_f;
    }
    const auto d_z = derivative(0, g);
    const float skip = p.skip, branch = p.branch;
    const bool alone = last == 0;
    each([=](int64_t i, int64_t v, int r) {
      prefetch(d_x + i);
      prefetch(d_f + i);
      const Vec d = d_z(i, v, r);
      d_x[i] = skip * (alone ? d : d_x[i] + d);
      d_f[i] = branch * d;
    });
  }

  // A function that gives step k's n, which `normalise` has left in memory.
  auto stored_n(int64_t k) const {
    return [n = memory + k * size](int64_t i, int64_t, int) { return n[i]; };
  }

  // A function that gives the second of two steps' n, and computes and stores both on the way.
  auto computed_n(const Vec* x, const Vec* f) const {
    return [=, skip = p.skip, branch = p.branch, one = at(0), two = at(1), n = memory, ahead = size](
               int64_t i, int64_t v, int r) RSKIP_INLINE {
      prefetch(x + i);
      prefetch(f + i);
      const Vec skipped = skip * x[i];
      const Vec first = n[i] = one.normed(skipped + branch * f[i], r);
      const Vec y = one.y(first, v);
      return n[i + ahead] = two.normed(skipped + y, r);
    };
  }

  // Sums over the group's rows: adds the gradients of step k's gain and bias to d_params, and takes the means that
  // derivative(k) needs of each row. `upstream` gives the gradient of y_k, `normed` n_k.
  template <class F, class N>
  RSKIP_INLINE void sum_gradients(int64_t k, Vec* d_params, F upstream, N normed) {
    const Step step = at(k);
    Vec *const d_gain = d_params + 2 * k * nv, *const d_bias = d_gain + nv;
    Vec sums_t[R], sums_tn[R];  // t = g * gain
    for (int block = 0; block < R; block += kBlock) {
      Vec of_t[kBlock] = {}, of_tn[kBlock] = {};
      for (int64_t v = 0; v < nv; ++v) {
        Vec of_gain = {}, of_bias = {};
        for (int r = 0; r < kBlock; ++r) {
          const int64_t i = (block + r) * nv + v;
          const Vec g = upstream(i, v, block + r);
          const Vec n = normed(i, v, block + r);
          const Vec t = g * step.gain[v];
          of_t[r] += t;
          of_tn[r] += t * n;
          of_gain += g * n;
          of_bias += g;
        }
        d_gain[v] += of_gain;
        d_bias[v] += of_bias;
      }
      for (int r = 0; r < kBlock; ++r) {
        sums_t[block + r] = of_t[r];
        sums_tn[block + r] = of_tn[r];
      }
    }
    row_scale[0] = moments[2 * k];
    minus_mean_tn[0] = tree(sums_tn) * -inverse;
    minus_mean_t[0] = p.rms ? Vec{} : tree(sums_t) * -inverse;
  }

  // A function that gives the gradient of z_k, scale * (t - mean(t) - n * mean(t * n)) with t = g * gain, from g, the
  // gradient of y_k; after sum_gradients(k).
  auto derivative(int64_t k, const Vec* g) const {
    return [g, gain = p.gains[k], n = memory + k * size, scale = number(row_scale), of_n = number(minus_mean_tn),
            rest = number(minus_mean_t)](int64_t i, int64_t v, int r) RSKIP_INLINE -> Vec {
      return (g[i] * gain[v] + rest[r] + n[i] * of_n[r]) * scale[r];
    };
  }

  // the sum over each row of what `terms` gives
  template <class F>
  RSKIP_INLINE Vec sum(F terms) const {
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
  static RSKIP_INLINE Vec tree(Vec (&rows)[R]) {
    folds<1>(rows);
    return rows[0];
  }

  template <int S>
  static RSKIP_INLINE void folds(Vec (&rows)[R]) {
    constexpr std::make_integer_sequence<int, kLanes> lanes;
    if constexpr (S < R) {
      for (int r = 0; r < R; r += 2 * S) rows[r] = fold<S>(rows[r], rows[r + S], lanes);
    } else {
      rows[0] = fold<S>(rows[0], rows[0], lanes);
    }
    if constexpr (2 * S < kLanes) folds<2 * S>(rows);
  }

  const Problem& p;
  const int64_t nv = NV ? NV : p.dim / kLanes, size = R * nv;
  const float inverse = 1.0f / p.dim;
  const std::unique_ptr<Line[]> lines{new Line[(p.steps + 1) * size + 4 * p.steps + 3]};
  Vec* const memory = reinterpret_cast<Vec*>(lines.get());  // n of each step, and a row of its own for each
  // [steps][2]: 1 / sqrt(var + eps) and the mean; step k's p and their gradients.
  Vec *const moments = memory + (p.steps + 1) * size, *const weights = moments + 2 * p.steps;
  Vec* const slopes = weights + p.steps;
  // what `derivative` takes of each row
  Vec *const row_scale = slopes + p.steps, *const minus_mean_tn = row_scale + 1, *const minus_mean_t = row_scale + 2;
};

}  // namespace rskip
