/* FedBiO and FedBiOAcc on weighted logistic regression, written out by hand: the near-limit yardstick of the benchmark.
 *
 * All derivatives are in closed form, every minibatch is read from memory once (FedBiOAcc evaluates both of its points
 * on it while it is in the cache), nothing is allocated in the loop. One thread, no intrinsics: GNU C vector types let
 * the compiler use whatever the target has (SSE2 with plain -O3, AVX2 or AVX-512 with -march=native).
 *
 * Built with -DREAL=float -DSINGLE or -DREAL=double, -DFEATURES=... -DGROUPS=... [-DTILE=...]; rows are padded to WIDTH
 * numbers and aligned to 64 bytes.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
#define BYTES 64
#elif defined(__AVX__)
#define BYTES 32
#else
#define BYTES 16
#endif

typedef REAL real;
typedef real vec __attribute__((vector_size(BYTES)));

#define LANES ((int)(BYTES / sizeof(real)))
#define PER_LINE ((int)(64 / sizeof(real)))
#define WIDTH ((FEATURES + PER_LINE - 1) / PER_LINE * PER_LINE)
#define CHUNKS (WIDTH / LANES)
#define BLOCK (CHUNKS % 7 == 0 ? 7 : CHUNKS % 4 == 0 ? 4 : CHUNKS % 2 == 0 ? 2 : 1) /* chunks summed in registers */
#ifndef TILE
#define TILE 32 /* rows handled together: 32 x 448 bytes stay in the first-level cache; even */
#endif
#define INLINE static inline __attribute__((always_inline))

typedef struct {
    const real *rows;
    const real *labels;
    const int32_t *groups;
    int64_t count;
} table;

typedef struct {
    table train, val;
} client_data;

typedef struct {
    int32_t accelerated, terms, local_steps, batch; /* batch 0: the whole set */
    double neumann_step, inner_step, outer_step, ridge, delta, u, sigma, c_inner, c_outer;
} options;

/* Two points: 0 is the current one, 1 the previous one (FedBiOAcc only). */
typedef struct {
    real x[2][GROUPS], nu[GROUPS];
    real y[2][WIDTH] __attribute__((aligned(64)));
    real omega[WIDTH] __attribute__((aligned(64)));
    uint64_t random;
} client_state;

int fused_width(void) { return WIDTH; }

/* exp(-z) to float accuracy without a call, so that the loop over a tile is vectorised. */
INLINE real sigmoid(real z) {
#ifdef SINGLE
    float t = -z;
    t = t > 87.0f ? 87.0f : t;
    t = t < -87.0f ? -87.0f : t;
    const float shifted = t * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: rounds to the nearest integer */
    const float whole = shifted - 12582912.0f;
    const float r = (t - whole * 0.693359375f) + whole * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const union { int32_t i; float f; } scale = {.i = ((int32_t)whole + 127) << 23};
    return 1.0f / (1.0f + p * scale.f);
#else
    return (real)(1 / (1 + exp(-(double)z)));
#endif
}

typedef struct {
    const table *data;
    const int32_t *index; /* NULL: rows 0, 1, ... */
    int64_t count;
} batch;

/* TILE rows of a batch; past the end of the batch a row is repeated with share 0, so that loops have fixed lengths. */
typedef struct {
    const real *rows[TILE], *ahead[TILE];
    real labels[TILE], share[TILE];
    int32_t groups[TILE];
} tile;

INLINE int64_t at(const batch *b, int64_t i) { return b->index ? b->index[i] : i; }

INLINE void load(const batch *b, const batch *following, int64_t start, tile *t) {
    const int64_t last = b->count - 1;
    const real share = (real)1 / (real)b->count;
    for (int r = 0; r < TILE; r++) {
        const int64_t i = at(b, start + r < last ? start + r : last);
        t->rows[r] = b->data->rows + i * WIDTH;
        t->labels[r] = b->data->labels[i];
        t->groups[r] = b->data->groups ? b->data->groups[i] : 0;
        t->share[r] = start + r <= last ? share : 0;
    }
    const int64_t from = start + TILE <= last ? start + TILE : 0;
    const batch *source = from ? b : following;
    for (int r = 0; r < TILE; r++) {
        const int64_t i = from + r < source->count ? from + r : source->count - 1;
        t->ahead[r] = source->data->rows + at(source, i) * WIDTH;
    }
}

/* The sum over the lanes, as a tree: halves are added until one number is left. */
INLINE real lane_sum(vec v) {
    union { vec v; real lane[LANES]; } u = {v};
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int l = 0; l < half; l++) u.lane[l] += u.lane[l + half];
    return u.lane[0];
}

/* out[k][r] = rows[r] . vectors[k]; two rows at a time keep enough independent sums in flight. Meanwhile the rows of
 * the tile after this one are asked for, a few lines at a time: all at once would fill the queue of pending loads. */
INLINE void products(const int kinds, const tile *t, const real *const *vectors, real out[][TILE]) {
    for (int r = 0; r < TILE; r += 2) {
        const vec *first = (const vec *)t->rows[r], *second = (const vec *)t->rows[r + 1];
        const char *ahead = (const char *)t->ahead[r], *beyond = (const char *)t->ahead[r + 1];
        vec a[4], b[4];
        for (int k = 0; k < kinds; k++) a[k] = b[k] = (vec){0};
        for (int c = 0; c < CHUNKS; c++) {
            if (c * BYTES % 64 == 0) {
                __builtin_prefetch(ahead + c * BYTES);
                __builtin_prefetch(beyond + c * BYTES);
            }
            const vec p = first[c], q = second[c];
            for (int k = 0; k < kinds; k++) {
                const vec v = ((const vec *)vectors[k])[c];
                a[k] += p * v;
                b[k] += q * v;
            }
        }
        for (int k = 0; k < kinds; k++) {
            out[k][r] = lane_sum(a[k]);
            out[k][r + 1] = lane_sum(b[k]);
        }
    }
}

/* sums[k] += sum_r factors[k][r] * rows[r] */
INLINE void combine(const int kinds, const tile *t, real factors[][TILE], real sums[][WIDTH]) {
    for (int c = 0; c < CHUNKS; c += BLOCK) {
        vec s[2][BLOCK];
        for (int k = 0; k < kinds; k++)
            for (int j = 0; j < BLOCK; j++) s[k][j] = ((vec *)sums[k])[c + j];
        for (int r = 0; r < TILE; r++)
            for (int j = 0; j < BLOCK; j++) {
                const vec p = ((const vec *)t->rows[r])[c + j];
                for (int k = 0; k < kinds; k++) s[k][j] += p * factors[k][r];
            }
        for (int k = 0; k < kinds; k++)
            for (int j = 0; j < BLOCK; j++) ((vec *)sums[k])[c + j] = s[k][j];
    }
}

/* out[k] = mean of weight * (sigmoid(z) - label) * row + ridge * y; the validation loss has no weights and no ridge. */
INLINE void gradients(const int points, const batch *b, const batch *following, real weights[][GROUPS],
                      const int weighted, real y[][WIDTH], real ridge, real out[][WIDTH]) {
    const real *vectors[2] = {y[0], y[1]};
    real z[2][TILE];
    tile t;
    for (int k = 0; k < points; k++) memset(out[k], 0, sizeof out[k]);
    for (int64_t start = 0; start < b->count; start += TILE) {
        load(b, following, start, &t);
        products(points, &t, vectors, z);
        for (int k = 0; k < points; k++) {
            for (int r = 0; r < TILE; r++) z[k][r] = (sigmoid(z[k][r]) - t.labels[r]) * t.share[r];
            if (weighted)
                for (int r = 0; r < TILE; r++) z[k][r] *= weights[k][t.groups[r]];
        }
        combine(points, &t, z, out);
    }
    for (int k = 0; k < points; k++)
        for (int j = 0; j < WIDTH; j++) out[k][j] += ridge * y[k][j];
}

/* term[k] <- term[k] - step * (Hessian at point k) term[k]; total[k] += term[k] */
INLINE void neumann_factor(const int points, const batch *b, const batch *following, real weights[][GROUPS],
                           real y[][WIDTH], real ridge, real step, real term[][WIDTH], real total[][WIDTH]) {
    const real *vectors[4];
    real z[4][TILE], product[2][WIDTH] __attribute__((aligned(64)));
    tile t;
    for (int k = 0; k < points; k++) {
        vectors[k] = y[k];
        vectors[points + k] = term[k];
        memset(product[k], 0, sizeof product[k]);
    }
    for (int64_t start = 0; start < b->count; start += TILE) {
        load(b, following, start, &t);
        products(2 * points, &t, vectors, z);
        for (int k = 0; k < points; k++) {
            for (int r = 0; r < TILE; r++) {
                const real s = sigmoid(z[k][r]);
                z[k][r] = s * (1 - s) * z[points + k][r] * t.share[r];
            }
            for (int r = 0; r < TILE; r++) z[k][r] *= weights[k][t.groups[r]];
        }
        combine(points, &t, z, product);
    }
    for (int k = 0; k < points; k++)
        for (int j = 0; j < WIDTH; j++) {
            term[k][j] -= step * (product[k][j] + ridge * term[k][j]);
            total[k][j] += term[k][j];
        }
}

/* out[k] = (d/dx of grad_y g at point k) . direction[k]; weight_a = K softmax(x)_a, so the ridge drops out. */
INLINE void cross(const int points, const batch *b, const batch *following, real weights[][GROUPS], real y[][WIDTH],
                  real direction[][WIDTH], real out[][GROUPS]) {
    const real *vectors[4];
    real z[4][TILE], by_group[2][GROUPS] = {{0}};
    tile t;
    for (int k = 0; k < points; k++) vectors[k] = y[k], vectors[points + k] = direction[k];
    for (int64_t start = 0; start < b->count; start += TILE) {
        load(b, following, start, &t);
        products(2 * points, &t, vectors, z);
        for (int k = 0; k < points; k++) {
            for (int r = 0; r < TILE; r++)
                z[k][r] = (sigmoid(z[k][r]) - t.labels[r]) * z[points + k][r] * t.share[r];
            for (int r = 0; r < TILE; r++) by_group[k][t.groups[r]] += z[k][r];
        }
    }
    for (int k = 0; k < points; k++) {
        real mean = 0;
        for (int a = 0; a < GROUPS; a++) mean += by_group[k][a] * weights[k][a] / GROUPS;
        for (int a = 0; a < GROUPS; a++) out[k][a] = weights[k][a] * (by_group[k][a] - mean);
    }
}

static void group_weights(const real *x, real *weights) {
    real top = x[0], total = 0;
    for (int a = 1; a < GROUPS; a++) top = x[a] > top ? x[a] : top;
    for (int a = 0; a < GROUPS; a++) total += weights[a] = (real)exp((double)(x[a] - top));
    for (int a = 0; a < GROUPS; a++) weights[a] *= GROUPS / total;
}

/* splitmix64, one number for two indices */
static void draw(uint64_t *state, int64_t count, int size, int32_t *index) {
    for (int i = 0; i < size; i += 2) {
        uint64_t z = (*state += 0x9e3779b97f4a7c15u);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        z ^= z >> 31;
        index[i] = (int32_t)(((z & 0xffffffffu) * (uint64_t)count) >> 32);
        if (i + 1 < size) index[i + 1] = (int32_t)(((z >> 32) * (uint64_t)count) >> 32);
    }
}

/* The minibatch of a slot: 0 for the inner gradient, 1 for validation, 2 for the cross derivative, then Hessians. */
INLINE batch minibatch(const client_data *data, const options *o, const int32_t *index, int slot) {
    const table *source = slot == 1 ? &data->val : &data->train;
    if (o->batch == 0) return (batch){source, NULL, source->count};
    return (batch){source, index + (int64_t)slot * o->batch, o->batch};
}

/* One local step on the minibatches index[slots][batch]. */
INLINE void local_step(const int points, const client_data *data, client_state *s, const options *o, int64_t t,
                       const int32_t *index) {
    real weights[2][GROUPS], mu[2][GROUPS];
    real gradient[2][WIDTH] __attribute__((aligned(64)));
    real term[2][WIDTH] __attribute__((aligned(64))), total[2][WIDTH] __attribute__((aligned(64)));
    const real ridge = (real)o->ridge, step = (real)o->neumann_step;
    for (int k = 0; k < points; k++) group_weights(s->x[k], weights[k]);

    batch b = minibatch(data, o, index, 1), following = minibatch(data, o, index, o->terms ? 3 : 2);
    gradients(points, &b, &following, weights, 0, s->y, 0, term);
    memcpy(total, term, sizeof term);
    for (int j = 0; j < o->terms; j++) {
        b = following;
        following = minibatch(data, o, index, j + 1 < o->terms ? 4 + j : 2);
        neumann_factor(points, &b, &following, weights, s->y, ridge, step, term, total);
    }
    for (int k = 0; k < points; k++)
        for (int j = 0; j < WIDTH; j++) total[k][j] *= step;
    b = following;
    following = minibatch(data, o, index, 0);
    cross(points, &b, &following, weights, s->y, total, mu);
    gradients(points, &following, &following, weights, 1, s->y, ridge, gradient);

    double alpha = 1, keep_inner = 0, keep_outer = 0;
    if (o->accelerated) {
        const double before = o->delta / cbrt(o->u + o->sigma * o->sigma * (double)(t - 1));
        alpha = o->delta / cbrt(o->u + o->sigma * o->sigma * (double)t);
        keep_inner = fmin(fmax(1 - o->c_inner * before * before, 0), 1);
        keep_outer = fmin(fmax(1 - o->c_outer * before * before, 0), 1);
    }
    const real inner_step = (real)(o->inner_step * alpha), outer_step = (real)(o->outer_step * alpha);
    for (int j = 0; j < WIDTH; j++) {
        real omega = gradient[0][j];
        if (points == 2) omega += (real)keep_inner * (s->omega[j] - gradient[1][j]);
        s->omega[j] = omega;
        s->y[1][j] = s->y[0][j];
        s->y[0][j] -= inner_step * omega;
    }
    for (int a = 0; a < GROUPS; a++) {
        real nu = -mu[0][a];
        if (points == 2) nu += (real)keep_outer * (s->nu[a] + mu[1][a]);
        s->nu[a] = nu;
        s->x[1][a] = s->x[0][a];
        s->x[0][a] -= outer_step * nu;
    }
}

static void average(client_state *s, int clients, size_t offset) {
    for (int a = 0; a < GROUPS; a++) {
        real mean = 0;
        for (int m = 0; m < clients; m++) mean += ((real *)((char *)&s[m] + offset))[a];
        mean /= (real)clients;
        for (int m = 0; m < clients; m++) ((real *)((char *)&s[m] + offset))[a] = mean;
    }
}

/* The whole run from x = 0, y = 0. outer: [clients][GROUPS], inner: [clients][WIDTH]. Returns 1 without memory. */
int fused_run(int clients, const client_data *data, const options *o, int64_t steps, const int32_t *given,
              uint64_t seed, real *outer, real *inner) {
    client_state *s = aligned_alloc(64, sizeof(client_state) * (size_t)clients);
    const int64_t slots = o->terms + 3;
    int32_t *drawn = malloc(sizeof(int32_t) * (size_t)(slots * o->batch + 1));
    if (!s || !drawn) {
        free(s);
        free(drawn);
        return 1;
    }
    memset(s, 0, sizeof(client_state) * (size_t)clients);
    for (int m = 0; m < clients; m++) s[m].random = seed * 1000003u + (uint64_t)m;
    for (int64_t t = 1; t <= steps; t++) {
        for (int m = 0; m < clients; m++) {
            const int32_t *index = given ? given + ((t - 1) * clients + m) * slots * o->batch : drawn;
            if (!given)
                for (int slot = 0; slot < slots; slot++)
                    draw(&s[m].random, slot == 1 ? data[m].val.count : data[m].train.count, o->batch,
                         drawn + slot * o->batch);
            if (o->accelerated && t > 1)
                local_step(2, &data[m], &s[m], o, t, index);
            else
                local_step(1, &data[m], &s[m], o, t, index);
        }
        if (t % o->local_steps == 0) {
            average(s, clients, offsetof(client_state, x[0]));
            if (o->accelerated) {
                average(s, clients, offsetof(client_state, x[1]));
                average(s, clients, offsetof(client_state, nu));
            }
        }
    }
    for (int m = 0; m < clients; m++) {
        memcpy(outer + m * GROUPS, s[m].x[0], sizeof s[m].x[0]);
        memcpy(inner + (int64_t)m * WIDTH, s[m].y[0], sizeof s[m].y[0]);
    }
    free(s);
    free(drawn);
    return 0;
}
