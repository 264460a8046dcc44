/* Scans along the columns of a row: what a scan has combined so far is a value of T, which F::join(a, b) takes further: to `a` of the
 * columns before, `b` of those after them is added.  Joining is associative, but for rounding, and the order is fixed. */

/* The extremum visited last among equals; NaN is better than all numbers, and the last one counts. */
template <class T> struct gradc_last_max {
  static __device__ __forceinline__ void join(gradc_arg_extremum<T> &a, const gradc_arg_extremum<T> &b) {
    if (a.index < 0 || b.value != b.value || b.value >= a.value) a = b;
  }
};
template <class T> struct gradc_last_min {
  static __device__ __forceinline__ void join(gradc_arg_extremum<T> &a, const gradc_arg_extremum<T> &b) {
    if (a.index < 0 || b.value != b.value || b.value <= a.value) a = b;
  }
};

/* y -> factor * y + term; a factor of 0 forgets infinities and NaN, too.  A term of 0 stays 0 behind finite factors, whose product may
 * be beyond T. */
template <class T> struct gradc_affine { T factor, term; };
template <class T> struct gradc_composed {
  static __device__ __forceinline__ void join(gradc_affine<T> &a, const gradc_affine<T> &b) {
    const bool forgets = b.factor == 0 || (a.term == 0 && b.factor == b.factor);
    a.term = forgets ? b.term : b.factor * a.term + b.term;
    a.factor = b.factor == 0 ? 0 : a.factor * b.factor;
  }
};

GRADC_FN f32 gradc_exp(f32 x) { return exp_f32(x); }
GRADC_FN f64 gradc_exp(f64 x) { return exp_f64(x); }
GRADC_FN f32 gradc_log(f32 x) { return log_f32(x); }
GRADC_FN f64 gradc_log(f64 x) { return log_f64(x); }

/* log(sum of exp) as log(total) + top, where `top` is the largest exponent; equal infinities have no difference. */
template <class T> struct gradc_log_total { T top, total; };
template <class T> GRADC_FN T gradc_value(gradc_log_total<T> v) { return v.top + gradc_log(v.total); }
template <class T> struct gradc_log_sum {
  static __device__ __forceinline__ void join(gradc_log_total<T> &a, const gradc_log_total<T> &b) {
    const T top = b.top > a.top ? b.top : a.top;
    const T scale_a = a.top == top ? (T)1 : gradc_exp(a.top - top), scale_b = b.top == top ? (T)1 : gradc_exp(b.top - top);
    a.total = a.total * scale_a + b.total * scale_b;
    a.top = top;
  }
};

/* The combination of all columns up to this thread's own: `carry` is that of the strips before, and of this one too behind the call.
 * The W threads of a task call it together, each with the next column; those behind the last column come last.  W is 1, or whole
 * warps.  shared: room for 32 of T, free again at the end. */
template <class F, int W, class T> GRADC_FN T gradc_scan(T v, T &carry, char *shared) {
  const int lane = (int)(threadIdx.x % 32), warp = (int)(threadIdx.x % W) / 32;
  T before = carry;
  if (W > 1) {
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      T lower = gradc_shuffle_up(v, 0xffffffffu, distance);
      F::join(lower, v);
      if (lane >= distance) v = lower;
    }
  }
  if (W > 32) {
    T *const each = (T *)shared;
    if (lane == 31) each[warp] = v;
    __syncthreads();
    for (int i = 0; i < W / 32; i++) {
      if (i == warp) before = carry;
      F::join(carry, each[i]);
    }
    __syncthreads();
  }
  F::join(before, v);
  if (W == 32) carry = gradc_broadcast(before, 0xffffffffu, 31);
  if (W == 1) carry = before;
  return before;
}

/* To a scan's carry what the columns of all strips before one are combined to is added, in their order: `count` of them at `strips`.
 * A task is more than a warp. */
template <class F, int W, class T> GRADC_FN void gradc_scan_before(const T *strips, ix count, T &carry, char *shared) {
  const int lane = (int)(threadIdx.x % W);
  T *const whole = (T *)shared, start = carry;
  if (count == 0) return;
  for (ix at = lane; at - lane < count; at += W) {
    const T found = gradc_scan<F, W>(at < count ? strips[at] : start, carry, shared);
    if (at == count - 1) *whole = found;
  }
  __syncthreads();
  carry = *whole;
  __syncthreads();
}
