/* The small operations of a decoding step in bfloat16, each in one pass over its rows; rounded where
   torch rounds. WIDTH of a head and GROUP, heads that share a key head, are given to the compiler. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 16
#define BLOCK 32 /* two vectors: the even and the odd numbers of so many in bfloat16 */
#define PARTS (WIDTH / BLOCK)
typedef uint16_t bf16;
typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t bits __attribute__((vector_size(4 * LANES)));
typedef struct {
    vec even, odd;
} pair;

static inline float up(bf16 x) {
    uint32_t u = (uint32_t)x << 16;
    float y;
    memcpy(&y, &u, 4);
    return y;
}

static inline bf16 down(float x) { /* to the nearest, ties to even */
    uint32_t u;
    memcpy(&u, &x, 4);
    return (bf16)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

static inline pair load(const bf16 *x) {
    bits both;
    memcpy(&both, x, sizeof both);
    return (pair){(vec)(both << 16), (vec)(both & 0xffff0000u)};
}

static inline bits rounded(vec x) {
    bits u = (bits)x;
    return u + 0x7fff + ((u >> 16) & 1);
}

static inline void store(bf16 *x, pair values) {
    bits both = (rounded(values.even) >> 16) | (rounded(values.odd) & 0xffff0000u);
    memcpy(x, &both, sizeof both);
}

static inline vec narrow(vec x) { /* as bfloat16 has it */
    return (vec)(rounded(x) & 0xffff0000u);
}

static inline vec exp_of(vec x) { /* of numbers up to 0; about 2 units in the last place */
    const vec least = (vec){} - 87.0f;
    ints small = x < least;
    x = (vec)((small & (ints)least) | (~small & (ints)x));
    ints k = __builtin_convertvector(x * 1.44269504f - 0.5f, ints); /* rounded, as x ≤ 0 */
    vec n = __builtin_convertvector(k, vec);
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return (vec)((ints)p + (k << 23));
}

/* x += added, where it is given; out = weight · x / rms(x). */
void rms_norm(bf16 *x, const bf16 *added, const bf16 *weight, float eps, bf16 *out, long rows,
              long width) {
    for (long r = 0; r < rows; r++, x += width, out += width) {
        float sum = 0;
        if (added) {
            for (long i = 0; i < width; i++) x[i] = down(up(x[i]) + up(added[i]));
            added += width;
        }
        for (long i = 0; i < width; i++) sum += up(x[i]) * up(x[i]);
        float scale = 1 / sqrtf(sum / width + eps);
        for (long i = 0; i < width; i++) out[i] = down(up(down(up(x[i]) * scale)) * up(weight[i]));
    }
}

static inline vec silu(vec x) {
    ints negative = x < 0.0f;
    vec e = exp_of((vec)((ints)x | INT32_MIN)); /* of -|x| */
    vec part = (vec)((negative & (ints)e) | (~negative & (ints)((vec){} + 1.0f)));
    return x * part / (1.0f + e);
}

/* (rows, [gate, up]) → silu(gate) · up, (rows, width); width is a multiple of BLOCK. */
void swiglu(const bf16 *both, bf16 *out, long rows, long width) {
    for (long r = 0; r < rows; r++, both += 2 * width, out += width)
        for (long i = 0; i < width; i += BLOCK) {
            pair gate = load(both + i), upper = load(both + width + i);
            pair found = {narrow(silu(gate.even)) * upper.even, narrow(silu(gate.odd)) * upper.odd};
            store(out + i, found);
        }
}

/* `sine` is negative in the first half. */
static inline void rotate(const bf16 *x, const bf16 *cosine, const bf16 *sine, float *out) {
    const bf16 *turned = x + WIDTH / 2;
    for (int half = 0; half < WIDTH; half += WIDTH / 2, turned = x)
        for (int i = 0; i < WIDTH / 2; i++)
            out[half + i] = up(down(up(down(up(x[half + i]) * up(cosine[half + i])))
                                    + up(turned[i]) * up(sine[half + i])));
}

/* Where the score of key k stands: the even ones of a block first. */
static inline long place(long k) { return (k & -BLOCK) + (k & 1) * LANES + (k % BLOCK) / 2; }

/* Scores of GROUP queries to `count` keys (WIDTH, stride), −∞ up to the next block. */
static inline void score(const float *query, const bf16 *key, long count, long stride,
                         float *scores, long all) {
    for (long k = 0; k < count; k += BLOCK) {
        vec even[GROUP] = {}, odd[GROUP] = {};
        for (int w = 0; w < WIDTH; w++) {
            pair keys = load(key + w * stride + k);
            for (int g = 0; g < GROUP; g++) {
                even[g] += keys.even * query[g * WIDTH + w];
                odd[g] += keys.odd * query[g * WIDTH + w];
            }
        }
        for (int g = 0; g < GROUP; g++) {
            memcpy(scores + g * all + k, even + g, sizeof(vec));
            memcpy(scores + g * all + k + LANES, odd + g, sizeof(vec));
        }
    }
    for (int g = 0; g < GROUP; g++)
        for (long k = count; k % BLOCK; k++) scores[g * all + place(k)] = -INFINITY;
}

/* The largest of the scores of `count` keys, and of `largest`. */
static inline float larger(const float *scores, long count, float largest) {
    vec most = (vec){} - INFINITY;
    for (long k = 0; k < (count + BLOCK - 1) / BLOCK * BLOCK; k += LANES) {
        vec x;
        memcpy(&x, scores + k, sizeof x);
        ints which = most > x;
        most = (vec)((which & (ints)most) | (~which & (ints)x));
    }
    for (int i = 0; i < LANES; i++) largest = most[i] > largest ? most[i] : largest;
    return largest;
}

/* Scores → exp(score − largest); their sum. */
static inline float weigh(float *scores, long count, float largest) {
    vec sums = {};
    for (long k = 0; k < (count + BLOCK - 1) / BLOCK * BLOCK; k += LANES) {
        vec x;
        memcpy(&x, scores + k, sizeof x);
        x = exp_of(x - largest);
        memcpy(scores + k, &x, sizeof x);
        sums += x;
    }
    float total = 0;
    for (int i = 0; i < LANES; i++) total += sums[i];
    return total;
}

/* sums += weights · values, a block of the width at a time, which stays in registers. */
static inline void mix(const float *weights, long all, const bf16 *value, long count,
                       pair sums[GROUP][PARTS]) {
    for (int p = 0; p < PARTS; p++) {
        pair own[GROUP];
        for (int g = 0; g < GROUP; g++) own[g] = sums[g][p];
        for (long k = 0; k < count; k++) {
            pair values = load(value + k * WIDTH + p * BLOCK);
            for (int g = 0; g < GROUP; g++) {
                own[g].even += values.even * weights[g * all + place(k)];
                own[g].odd += values.odd * weights[g * all + place(k)];
            }
        }
        for (int g = 0; g < GROUP; g++) sums[g][p] = own[g];
    }
}

/* Each row's new token, (rows, heads + 2 kv, WIDTH) before rotation, to the tokens of its prompt,
   keys (prompts, kv, WIDTH, longest) and values (prompts, kv, longest, WIDTH), and to its own,
   keys (rows, kv, WIDTH, room) and values (rows, kv, room, WIDTH), to which its own are added at
   `step`. `longest` and `room` are multiples of BLOCK. → (rows, heads, WIDTH). */
void attend(const bf16 *qkv, const bf16 *cosine, const bf16 *sine, const bf16 *prompt_key,
            const bf16 *prompt_value, const int64_t *prompt_of_row, const int64_t *lengths,
            bf16 *own_key, bf16 *own_value, bf16 *out, long rows, long kv, long longest, long room,
            long step, float scaling) {
    long heads = GROUP * kv, all = longest + room;
#pragma omp parallel for
    for (long at = 0; at < rows * kv; at++) {
        long r = at / kv, h = at % kv, prompt = prompt_of_row[r] * kv + h;
        long before = lengths[prompt_of_row[r]], own = step + 1;
        const bf16 *token = qkv + r * (heads + 2 * kv) * WIDTH;
        float query[GROUP * WIDTH], key[WIDTH], *scores = malloc(sizeof(float) * GROUP * all);
        for (int g = 0; g < GROUP; g++) {
            rotate(token + (h * GROUP + g) * WIDTH, cosine + r * WIDTH, sine + r * WIDTH,
                   query + g * WIDTH);
            for (int w = 0; w < WIDTH; w++) query[g * WIDTH + w] *= scaling;
        }
        rotate(token + (heads + h) * WIDTH, cosine + r * WIDTH, sine + r * WIDTH, key);
        bf16 *keys = own_key + at * WIDTH * room, *values = own_value + at * room * WIDTH;
        for (int w = 0; w < WIDTH; w++) keys[w * room + step] = down(key[w]);
        memcpy(values + step * WIDTH, token + (heads + kv + h) * WIDTH, WIDTH * sizeof(bf16));

        score(query, prompt_key + prompt * WIDTH * longest, before, longest, scores, all);
        score(query, keys, own, room, scores + longest, all);
        float total[GROUP];
        for (int g = 0; g < GROUP; g++) {
            float *mine = scores + g * all;
            float largest = larger(mine + longest, own, larger(mine, before, -INFINITY));
            total[g] = weigh(mine, before, largest) + weigh(mine + longest, own, largest);
        }
        pair sums[GROUP][PARTS] = {};
        mix(scores, all, prompt_value + prompt * longest * WIDTH, before, sums);
        mix(scores + longest, all, values, own, sums);
        for (int g = 0; g < GROUP; g++)
            for (int p = 0; p < PARTS; p++) {
                pair found = {sums[g][p].even / total[g], sums[g][p].odd / total[g]};
                store(out + (r * heads + h * GROUP + g) * WIDTH + p * BLOCK, found);
            }
        free(scores);
    }
}
