/* The small operations of a decoding step in bfloat16, each in one pass over its rows; rounded where
   torch rounds. WIDTH of a head and GROUP, heads that share a key head, are given to the compiler. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
#define PARTS (WIDTH / LANES)
typedef uint16_t bf16;
typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t bits __attribute__((vector_size(4 * LANES)));
typedef bf16 half __attribute__((vector_size(2 * LANES)));

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

static inline vec load(const bf16 *x) {
    half h;
    memcpy(&h, x, sizeof h);
    return (vec)(__builtin_convertvector(h, bits) << 16);
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

/* (rows, [gate, up]) → silu(gate) · up, (rows, width); width is a multiple of LANES. */
void swiglu(const bf16 *both, bf16 *out, long rows, long width) {
    for (long r = 0; r < rows; r++, both += 2 * width, out += width)
        for (long i = 0; i < width; i += LANES) {
            vec gate = load(both + i);
            ints negative = gate < 0.0f;
            vec e = exp_of((vec)((ints)gate | INT32_MIN)); /* of -|gate| */
            vec part = (vec)((negative & (ints)e) | (~negative & (ints)((vec){} + 1.0f)));
            vec opened = gate * part / (1.0f + e);
            for (int l = 0; l < LANES; l++)
                out[i + l] = down(up(down(opened[l])) * up(both[width + i + l]));
        }
}

static inline void rotate(const bf16 *x, const bf16 *cosine, const bf16 *sine, float *out) {
    for (int i = 0; i < WIDTH; i++)
        out[i] = up(down(up(down(up(x[i]) * up(cosine[i])))
                         + up(x[(i + WIDTH / 2) % WIDTH]) * up(sine[i])));
}

/* Scores of GROUP queries to `count` keys (WIDTH, stride). */
static void score(const float *query, const bf16 *key, long count, long stride, float *scores,
                  long all) {
    for (long k = 0; k < count; k += 2 * LANES) {
        int two = k + LANES < count;
        vec sums[GROUP][2] = {};
        for (int w = 0; w < WIDTH; w++) {
            vec a = load(key + w * stride + k), b = two ? load(key + w * stride + k + LANES) : a;
            for (int g = 0; g < GROUP; g++) {
                sums[g][0] += a * query[g * WIDTH + w];
                sums[g][1] += b * query[g * WIDTH + w];
            }
        }
        for (int g = 0; g < GROUP; g++) memcpy(scores + g * all + k, sums[g], (1 + two) * sizeof(vec));
    }
}

static void mix(const float *weights, long all, const bf16 *value, long count,
                vec sums[GROUP][PARTS]) {
    for (long k = 0; k < count; k++)
        for (int p = 0; p < PARTS; p++) {
            vec v = load(value + k * WIDTH + p * LANES);
            for (int g = 0; g < GROUP; g++) sums[g][p] += v * weights[g * all + k];
        }
}

/* Each row's new token, (rows, heads + 2 kv, WIDTH) before rotation, to the tokens of its prompt,
   keys (prompts, kv, WIDTH, longest) and values (prompts, kv, longest, WIDTH), and to its own,
   keys (rows, kv, WIDTH, room) and values (rows, kv, room, WIDTH), to which its own are added at
   `step`. `longest` and `room` are multiples of LANES. → (rows, heads, WIDTH). */
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
        float query[GROUP * WIDTH], key[WIDTH], scores[GROUP * all];
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
            float *mine = scores + g * all, most = -INFINITY;
            for (long k = 0; k < before; k++) most = mine[k] > most ? mine[k] : most;
            for (long k = 0; k < own; k++) most = mine[longest + k] > most ? mine[longest + k] : most;
            for (long k = before; k < longest; k++) mine[k] = -INFINITY;
            for (long k = own; k < room; k++) mine[longest + k] = -INFINITY;
            vec sums = {};
            for (long k = 0; k < all; k += LANES) {
                vec x;
                memcpy(&x, mine + k, sizeof x);
                x = exp_of(x - most);
                memcpy(mine + k, &x, sizeof x);
                sums += x;
            }
            total[g] = 0;
            for (int i = 0; i < LANES; i++) total[g] += sums[i];
        }
        vec sums[GROUP][PARTS] = {};
        mix(scores, all, prompt_value + prompt * longest * WIDTH, before, sums);
        mix(scores + longest, all, values, own, sums);
        for (int g = 0; g < GROUP; g++)
            for (int w = 0; w < WIDTH; w++)
                out[(r * heads + h * GROUP + g) * WIDTH + w] =
                    down(sums[g][w / LANES][w % LANES] / total[g]);
    }
}
