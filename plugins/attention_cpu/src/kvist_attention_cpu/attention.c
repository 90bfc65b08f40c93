/* Grouped-query attention over pages, written and read in one call. Compiled by kvist.native, called by backend.py.
 *
 * A page holds, for each key head, its keys as tiles [tile][element][TILE tokens] and its values as [token][element].
 * Keys with the token axis innermost need no horizontal sums: one vector holds one element of 16 tokens. Blocks that
 * are no multiple of 16 tokens have one tile as wide as the block and are copied into scratch before use.
 *
 * Softmax is computed online over chunks of 64 tokens (Milakov and Gimelshein, arXiv 1805.02867); queries that share
 * a key head are processed together (all query heads of a group times up to 64 queries).
 *
 * GCC vector extensions only, in the width that the machine has. Tiles are 16 tokens wide everywhere: a page has the
 * same bytes on every machine.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
enum { WIDTH = 16 };
#elif defined(__AVX__)
enum { WIDTH = 8 };
#else
enum { WIDTH = 4 };
#endif
enum { TILE = 16, CHUNK = 64, PER_TILE = TILE / WIDTH, VECTORS = CHUNK / WIDTH, QUERIES = 64, DIRECT_ROWS = 8 };
enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };
enum { PART_WORK = 1 << 16 }; /* fewer multiplications than this are not worth waking another thread */

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

typedef float vf __attribute__((vector_size(4 * WIDTH)));
typedef int32_t vi __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t vu __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t vh __attribute__((vector_size(2 * WIDTH)));
typedef vf vf_any __attribute__((aligned(2), may_alias));
typedef vh vh_any __attribute__((aligned(2), may_alias));

/* Mirrors native.StepArguments: what all layers of a group share during a step. */
typedef struct {
    const int32_t *table; /* [rows][width] */
    int64_t width;
    const int32_t *starts, *lengths;
    int32_t *units; /* room for a pair per token */
    int32_t rows, threads;
} step_arguments;

/* Mirrors native.LayerArguments. Strides count elements; the last axis of every tensor is contiguous. */
typedef struct {
    const step_arguments *step;
    /* the layer, set once */
    char *arena;
    int64_t page_bytes, key_offset, value_offset;
    int32_t block_tokens, heads, key_size, value_size, dtype, group_size;
    /* the call */
    float *scratch;
    int64_t scratch_floats; /* of one thread */
    const char *query, *key, *value;
    char *output; /* [token][query head][value_size] */
    int64_t query_token, query_head, key_token, key_head, value_token, value_head;
    int32_t query_dtype, sink_tokens;
    int64_t window; /* 0: none */
    const float *sink_logits;
    float scale, softcap; /* softcap 0: none */
} arguments;

INLINE vf splat(float x) { return x - (vf){0}; }
INLINE vf select(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }
INLINE vf larger(vf a, vf b) { return select(a > b, a, b); }
INLINE uint32_t bits_of(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
INLINE float float_of(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }
INLINE int item_bytes(int dtype) { return dtype == FLOAT32 ? 4 : 2; }
INLINE int64_t padded(int64_t n) { return (n + TILE - 1) / TILE * TILE; }
INLINE int32_t tile_tokens(const arguments *a) { return a->block_tokens % TILE ? a->block_tokens : TILE; }

/* A vector of stored elements as floats. */
INLINE vf load(int dtype, const char *p) {
    if (dtype == FLOAT32) return *(const vf_any *)p;
    vu u = __builtin_convertvector(*(const vh_any *)p, vu);
    if (dtype == BFLOAT16) return (vf)(u << 16);
    /* Half: shift the exponent into place, then correct its bias by a multiplication, exact for subnormals too. */
    vu magnitude = (u & 0x7fff) << 13;
    vf x = (vf)magnitude * 0x1p112f;
    vu special = (vu)((vi)(u & 0x7c00) == 0x7c00) & 0x7f800000;
    return (vf)((vu)x | special | (u & 0x8000) << 16);
}

INLINE float load_one(int dtype, const char *p) {
    if (dtype == FLOAT32) { float x; memcpy(&x, p, 4); return x; }
    uint16_t h;
    memcpy(&h, p, 2);
    if (dtype == BFLOAT16) return float_of((uint32_t)h << 16);
    float x = float_of((uint32_t)(h & 0x7fff) << 13) * 0x1p112f;
    return float_of(bits_of(x) | ((h & 0x7c00) == 0x7c00 ? 0x7f800000u : 0) | (uint32_t)(h & 0x8000) << 16);
}

/* Rounds to nearest, ties to even, as torch does. */
INLINE void store_one(int dtype, char *p, float x) {
    if (dtype == FLOAT32) { memcpy(p, &x, 4); return; }
    uint32_t u = bits_of(x), sign = u >> 16 & 0x8000, size = u & 0x7fffffff;
    uint16_t h;
    if (dtype == BFLOAT16) {
        h = size > 0x7f800000 ? 0x7fc0 : (u + 0x7fff + (u >> 16 & 1)) >> 16;
    } else if (size > 0x7f800000) {
        h = sign | 0x7e00;
    } else if (size >= 0x477ff000) { /* 65520 and above round to infinity */
        h = sign | 0x7c00;
    } else if (size < 0x38800000) { /* a unit in the last place of 0.5 is the step of half's subnormals */
        h = sign | (bits_of(float_of(size) + 0.5f) - 0x3f000000);
    } else {
        h = sign | (size - (112u << 23) + 0xfff + (size >> 13 & 1)) >> 13;
    }
    memcpy(p, &h, 2);
}

/* exp of x <= 0: x = n ln 2 + r with |r| <= ln 2 / 2 (ln 2 in two parts), Taylor series to degree 7 in r (the next
 * term is below 6e-9). Zero below -87, where floats end. */
INLINE vf exp_negative(vf x) {
    const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer in the low bits */
    vf y = larger(x, splat(-87.0f));
    vf shifted = y * 1.44269504f + shift;
    vf n = shifted - shift;
    vf r = y - n * 0.693359375f + n * 2.12194440e-4f;
    vf p = r * (1.0f / 5040) + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    vi exponent = ((vi)shifted - (vi)splat(shift) + 127) << 23;
    return select(x < -87.0f, splat(0.0f), p * (vf)exponent);
}

/* tanh |x| = (1 - e) / (1 + e) with e = exp(-2 |x|), and its series where that cancels. */
INLINE vf tanh_of(vf x) {
    vf size = (vf)((vi)x & 0x7fffffff), square = x * x;
    vf e = exp_negative(size * -2.0f);
    vf far = (1.0f - e) / (1.0f + e);
    vf near = square * (62.0f / 2835) - 17.0f / 315;
    near = near * square + 2.0f / 15;
    near = near * square - 1.0f / 3;
    near = size + size * square * near;
    vf y = select(size < 0.25f, near, far);
    return (vf)((vi)y | ((vi)x & (vi)splat(-0.0f)));
}

INLINE float sum_of(vf x) {
    float total = 0;
    for (int i = 0; i < WIDTH; i++) total += x[i];
    return total;
}

INLINE float largest_of(vf x) {
    float peak = x[0];
    for (int i = 1; i < WIDTH; i++) peak = x[i] > peak ? x[i] : peak;
    return peak;
}

/* scores[m][WIDTH * nt] = query[m] . keys of nt vectors of tokens, for mb queries. */
INLINE void score_block(const int dtype, const int mb, const int nt, const float *query, int key_size,
                        const char *const *tile, const char *const *next, float *scores) {
    vf acc[8][4];
    UNROLL for (int m = 0; m < mb; m++) UNROLL for (int t = 0; t < nt; t++) acc[m][t] = (vf){0};
    for (int e = 0; e < key_size; e++) {
        vf key[4];
        if (next) UNROLL for (int t = 0; t < nt; t += PER_TILE)
            __builtin_prefetch(next[t] + (ptrdiff_t)e * TILE * item_bytes(dtype), 0, 2);
        UNROLL for (int t = 0; t < nt; t++) key[t] = load(dtype, tile[t] + (ptrdiff_t)e * TILE * item_bytes(dtype));
        UNROLL for (int m = 0; m < mb; m++) {
            float q = query[(ptrdiff_t)m * key_size + e];
            UNROLL for (int t = 0; t < nt; t++) acc[m][t] += key[t] * q;
        }
    }
    UNROLL for (int m = 0; m < mb; m++)
        UNROLL for (int t = 0; t < nt; t++) *(vf_any *)(scores + m * CHUNK + t * WIDTH) = acc[m][t];
}

/* out[m][WIDTH * nv] = alpha[m] * out[m] + weights[m] . values of `count` tokens, for mb queries. */
INLINE void value_block(const int dtype, const int mb, const int nv, const float *weights, const float *alpha,
                        const char *const *value, const char *const *next, ptrdiff_t skip_bytes, int count, float *out,
                        ptrdiff_t out_stride) {
    vf acc[8][4];
    UNROLL for (int m = 0; m < mb; m++)
        UNROLL for (int n = 0; n < nv; n++)
            acc[m][n] = *(vf_any *)(out + m * out_stride + n * WIDTH) * alpha[m];
    for (int t = 0; t < count; t++) {
        vf row[4];
        if (next) UNROLL for (int n = 0; n < nv; n++)
            __builtin_prefetch(next[t] + skip_bytes + n * WIDTH * item_bytes(dtype), 0, 2);
        UNROLL for (int n = 0; n < nv; n++) row[n] = load(dtype, value[t] + skip_bytes + n * WIDTH * item_bytes(dtype));
        UNROLL for (int m = 0; m < mb; m++) {
            float w = weights[m * CHUNK + t];
            UNROLL for (int n = 0; n < nv; n++) acc[m][n] += row[n] * w;
        }
    }
    UNROLL for (int m = 0; m < mb; m++)
        UNROLL for (int n = 0; n < nv; n++) *(vf_any *)(out + m * out_stride + n * WIDTH) = acc[m][n];
}

/* One instance per number of queries, so that all accumulators are registers: of 32 with AVX-512, else of 16. */
#if defined(__AVX512F__)
#define EACH_BLOCK(CALL) \
    switch (mb) { \
    case 1: CALL(1, 4) break; case 2: CALL(2, 4) break; case 3: CALL(3, 4) break; case 4: CALL(4, 4) break; \
    case 5: CALL(5, 2) break; case 6: CALL(6, 2) break; case 7: CALL(7, 2) break; default: CALL(8, 2) break; \
    }
#else
#define EACH_BLOCK(CALL) \
    switch (mb) { \
    case 1: CALL(1, 4) break; case 2: CALL(2, 4) break; case 3: CALL(3, 2) break; case 4: CALL(4, 2) break; \
    case 5: CALL(5, 2) break; case 6: CALL(6, 2) break; case 7: CALL(7, 1) break; default: CALL(8, 1) break; \
    }
#endif

#define SCORE(MB, NT) \
    for (int t = 0; t < VECTORS; t += NT) \
        score_block(dtype, MB, NT, query + (ptrdiff_t)m * key_size, key_size, tile + t, next ? next + t : 0, \
                    scores + m * CHUNK + t * WIDTH);

#define VALUE(MB, NV) \
    { \
        int v = 0; \
        for (; v + NV * WIDTH <= size; v += NV * WIDTH) \
            value_block(dtype, MB, NV, weights + m * CHUNK, alpha + m, value, next, (ptrdiff_t)v * item_bytes(dtype), \
                        count, out + m * size + v, size); \
        for (; v < size; v += WIDTH) \
            value_block(dtype, MB, 1, weights + m * CHUNK, alpha + m, value, next, (ptrdiff_t)v * item_bytes(dtype), \
                        count, out + m * size + v, size); \
    }

INLINE void score_all(const int dtype, int rows, const float *query, int key_size, const char *const *tile,
                      const char *const *next, float *scores) {
    for (int m = 0; m < rows; m += 8) {
        int mb = rows - m < 8 ? rows - m : 8;
        EACH_BLOCK(SCORE)
    }
}

INLINE void value_all(const int dtype, int rows, const float *weights, const float *alpha, const char *const *value,
                      const char *const *next, int count, float *out, ptrdiff_t size) {
    for (int m = 0; m < rows; m += 8) {
        int mb = rows - m < 8 ? rows - m : 8;
        EACH_BLOCK(VALUE)
    }
}

/* Many queries, from float tiles and rows. */
static void score_many(int rows, const float *query, int key_size, const char *const *tile, float *scores) {
    score_all(FLOAT32, rows, query, key_size, tile, 0, scores);
}

static void value_many(int rows, const float *weights, const float *alpha, const char *const *value, int count,
                       float *out, ptrdiff_t size) {
    value_all(FLOAT32, rows, weights, alpha, value, 0, count, out, size);
}

/* Few queries, in place: memory is the limit, so the next chunk is fetched while this one is used. */
#define FOR_DTYPE(NAME, TYPE) \
    static void score_##NAME(int rows, const float *query, int key_size, const char *const *tile, \
                             const char *const *next, float *scores) { \
        score_all(TYPE, rows, query, key_size, tile, next, scores); \
    } \
    static void value_##NAME(int rows, const float *weights, const float *alpha, const char *const *value, \
                             const char *const *next, int count, float *out, ptrdiff_t size) { \
        value_all(TYPE, rows, weights, alpha, value, next, count, out, size); \
    }
FOR_DTYPE(f32, FLOAT32)
FOR_DTYPE(b16, BFLOAT16)
FOR_DTYPE(f16, FLOAT16)

static const struct {
    void (*score)(int, const float *, int, const char *const *, const char *const *, float *);
    void (*value)(int, const float *, const float *, const char *const *, const char *const *, int, float *, ptrdiff_t);
} FEW[] = {{score_f32, value_f32}, {score_b16, value_b16}, {score_f16, value_f16}};

/* Scratch of one thread. */
typedef struct { float *query, *scores, *out, *keys, *values, *peak, *alpha; vf *total; } scratch;

static int64_t lay_out(float *base, int64_t rows, int64_t key_size, int64_t value_size, scratch *s) {
    float *p = base;
    s->total = (vf *)p, p += rows * WIDTH;
    s->query = p, p += padded(rows * key_size);
    s->scores = p, p += rows * CHUNK;
    s->out = p, p += rows * padded(value_size);
    s->keys = p, p += CHUNK * key_size;
    s->values = p, p += CHUNK * padded(value_size);
    s->peak = p, p += padded(rows);
    s->alpha = p, p += padded(rows);
    return p - base;
}

INLINE int queries_per_unit(int group_size) { return group_size < QUERIES ? QUERIES / group_size : 1; }

int64_t kvist_scratch_floats(int32_t group_size, int32_t key_size, int32_t value_size) {
    scratch s;
    return lay_out(0, (int64_t)group_size * queries_per_unit(group_size), key_size, value_size, &s);
}

int64_t kvist_arguments_bytes(void) { return sizeof(arguments) + sizeof(step_arguments); }

/* Copies tokens first .. first + count - 1 of one head into float tiles. Lanes that no token fills keep what they had:
 * their scores are masked. */
static void stage_keys(const arguments *a, const int32_t *table, int head, int64_t first, int count, float *keys) {
    const int tile = tile_tokens(a), bytes = item_bytes(a->dtype);
    for (int done = 0; done < count;) {
        int64_t token = first + done, block = token / a->block_tokens, slot = token % a->block_tokens;
        const char *from = a->arena + table[block] * a->page_bytes + a->key_offset +
                           ((int64_t)head * a->block_tokens + slot / tile * tile) * a->key_size * bytes;
        int lane = slot % tile, left = tile - lane, room = TILE - done % TILE;
        int n = count - done < left ? count - done : left;
        if (n > room) n = room;
        float *to = keys + done / TILE * TILE * a->key_size + done % TILE;
        if (n == TILE && tile == TILE) {
            for (ptrdiff_t i = 0; i < (ptrdiff_t)a->key_size * TILE; i += WIDTH)
                *(vf_any *)(to + i) = load(a->dtype, from + i * bytes);
        } else {
            for (int e = 0; e < a->key_size; e++)
                for (int i = 0; i < n; i++)
                    to[e * TILE + i] = load_one(a->dtype, from + ((ptrdiff_t)e * tile + lane + i) * bytes);
        }
        done += n;
    }
}

/* Elements past `size` keep what they had: no output is made of them. */
static void stage_row(int dtype, const char *from, int size, float *to) {
    int v = 0;
    for (; v + WIDTH <= size; v += WIDTH) *(vf_any *)(to + v) = load(dtype, from + v * item_bytes(dtype));
    for (; v < size; v++) to[v] = load_one(dtype, from + v * item_bytes(dtype));
}

/* The scores of one chunk become weights; peaks, totals and the factors for what was summed before follow. */
static void soften(const arguments *a, const scratch *s, int rows, int64_t first, int64_t low, int64_t high,
                   int64_t position, int64_t last) {
    const int64_t window = a->window ? a->window : INT64_MAX / 2;
    const int whole = first >= low && first + CHUNK <= high && first + CHUNK - 1 <= position &&
                      (first > last - window || first + CHUNK <= a->sink_tokens);
    const vi lane = *(const vi *)(const int32_t[16]){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int m = 0; m < rows; m++) {
        float *row = s->scores + m * CHUNK;
        vf x[VECTORS], peaks = splat(-1e30f);
        /* All bounds relative to the chunk, so that they fit 32 bits. */
        int64_t query = position + m / a->group_size - first;
        int64_t from = query - window + 1;
        int begin = low > first ? low - first : 0, end = high - first < CHUNK ? high - first : CHUNK;
        int until = query + 1 < end ? query + 1 : end;
        int since = from < 0 ? 0 : from > CHUNK ? CHUNK : from;
        int64_t sinks = a->sink_tokens - first;
        int sunk = sinks < 0 ? 0 : sinks > CHUNK ? CHUNK : sinks;
        UNROLL for (int t = 0; t < VECTORS; t++) {
            x[t] = *(vf_any *)(row + t * WIDTH);
            if (a->softcap != 0) x[t] = a->softcap * tanh_of(x[t] / a->softcap);
            if (!whole) {
                vi token = lane + t * WIDTH;
                vi visible = (token >= begin) & (token < until) & ((token >= since) | (token < sunk));
                x[t] = select(visible, x[t], splat(-__builtin_inff()));
            }
            peaks = larger(x[t], peaks);
        }
        float peak = largest_of(peaks), before = s->peak[m];
        if (peak > before) {
            s->alpha[m] = exp_negative(splat(before - peak))[0];
            s->total[m] *= s->alpha[m];
            s->peak[m] = peak;
        } else {
            s->alpha[m] = 1.0f;
            peak = before;
        }
        UNROLL for (int t = 0; t < VECTORS; t++) {
            x[t] = exp_negative(x[t] - peak);
            s->total[m] += x[t];
            *(vf_any *)(row + t * WIDTH) = x[t];
        }
    }
}

/* Where the rows of one chunk are: vectors of keys (blocks of a multiple of 16 tokens only) and rows of values. */
typedef struct {
    const char *tile[VECTORS], *value[CHUNK];
    int64_t begin, end; /* tokens */
} places;

/* Finds tokens begin .. end - 1, the first of them in the tile that starts at `first`. Returns 0 when one of them has
 * no page. Unused entries repeat the last one: they are fetched or scored in vain, and masked. */
static int find_rows(const arguments *a, const int32_t *table, int head, int64_t first, int64_t low, int64_t high,
                     places *found) {
    const int bytes = item_bytes(a->dtype), block_tokens = a->block_tokens;
    const int64_t end = first + CHUNK < high ? first + CHUNK : high, begin = first > low ? first : low;
    found->begin = begin, found->end = end;
    int64_t token = begin;
    int count = 0, vectors = 0;
    while (token < end) {
        const int64_t block = token / block_tokens, slot = token % block_tokens;
        if (table[block] < 0) return 0;
        const char *page = a->arena + table[block] * a->page_bytes;
        const int64_t stop = token + block_tokens - slot < end ? token + block_tokens - slot : end;
        const int64_t row_bytes = (int64_t)a->value_size * bytes, in_head = (int64_t)head * block_tokens;
        const char *value = page + a->value_offset + (in_head + slot) * row_bytes;
        if (block_tokens % TILE == 0)
            for (int64_t at = slot / TILE * TILE; at < slot + stop - token; at += TILE)
                for (int i = 0; i < PER_TILE; i++)
                    found->tile[vectors++] = page + a->key_offset + ((in_head + at) * a->key_size + i * WIDTH) * bytes;
        for (; token < stop; token++, value += row_bytes) found->value[count++] = value;
    }
    if (block_tokens % TILE == 0)
        for (; vectors < VECTORS; vectors++) found->tile[vectors] = found->tile[vectors - PER_TILE];
    for (; count < CHUNK; count++) found->value[count] = found->value[count - 1];
    return 1;
}

/* Adds tokens low .. high - 1 to the unit. Returns 0, or 1 when one of them has no page. */
static int attend_range(const arguments *a, const scratch *s, const int32_t *table, int head, int rows, int64_t low,
                        int64_t high, int64_t position, int64_t last) {
    if (low >= high) return 0;
    const int aligned = a->block_tokens % TILE == 0, whole_vectors = a->value_size % TILE == 0;
    const int in_place = aligned && whole_vectors && rows <= DIRECT_ROWS;
    const int64_t out_size = padded(a->value_size);
    places buffers[2], *now = buffers, *next = buffers + 1;
    int64_t first = aligned ? low / TILE * TILE : low;
    if (!find_rows(a, table, head, first, low, high, now)) return 1;
    for (; first < high; first += CHUNK) {
        if (first + CHUNK >= high) *next = *now;
        else if (!find_rows(a, table, head, first + CHUNK, low, high, next)) return 1;
        const int count = now->end - now->begin;
        const float *weights = s->scores + (now->begin - first);
        if (in_place) {
            FEW[a->dtype].score(rows, s->query, a->key_size, now->tile, next->tile, s->scores);
            soften(a, s, rows, first, low, high, position, last);
            FEW[a->dtype].value(rows, weights, s->alpha, now->value, next->value, count, s->out, out_size);
        } else {
            const char **tile = now->tile, **value = now->value;
            if (!aligned || a->dtype != FLOAT32) {
                stage_keys(a, table, head, first, now->end - first, s->keys);
                for (int t = 0; t < VECTORS; t++)
                    tile[t] = (const char *)(s->keys + t / PER_TILE * TILE * a->key_size + t % PER_TILE * WIDTH);
            }
            score_many(rows, s->query, a->key_size, tile, s->scores);
            soften(a, s, rows, first, low, high, position, last);
            for (int t = 0; t < count && !(whole_vectors && a->dtype == FLOAT32); t++) {
                float *to = s->values + t * out_size;
                stage_row(a->dtype, value[t], a->value_size, to);
                value[t] = (const char *)to;
            }
            value_many(rows, weights, s->alpha, value, count, s->out, out_size);
        }
        places *swap = now;
        now = next, next = swap;
    }
    return 0;
}

/* All query heads of one key head, for up to queries_per_unit queries of one row. */
static int attend_unit(const arguments *a, const scratch *s, int row, int first_query, int head) {
    const int32_t *table = a->step->table + row * a->step->width;
    const int start = a->step->starts[row], count = a->step->starts[row + 1] - start, group = a->group_size;
    const int limit = queries_per_unit(group);
    const int queries = count - first_query < limit ? count - first_query : limit, rows = queries * group;
    const int64_t position = (int64_t)a->step->lengths[row] - count + first_query, last = position + queries - 1;
    const int64_t out_size = padded(a->value_size);
    const int bytes = item_bytes(a->query_dtype);
    for (int m = 0; m < rows; m++) {
        const char *from = a->query + ((start + first_query + m / group) * a->query_token +
                                       (head * group + m % group) * a->query_head) * bytes;
        float *to = s->query + (int64_t)m * a->key_size;
        for (int e = 0; e < a->key_size; e++) to[e] = a->scale * load_one(a->query_dtype, from + e * bytes);
        /* A sink logit is a token without a value: it starts the softmax. */
        s->peak[m] = a->sink_logits ? a->sink_logits[head * group + m % group] : -1e30f;
        s->total[m] = (vf){a->sink_logits ? 1.0f : 0.0f};
    }
    memset(s->out, 0, sizeof(float) * rows * out_size);
    int64_t begin = a->window && position - a->window + 1 > 0 ? position - a->window + 1 : 0;
    int64_t sinks = a->sink_tokens < begin ? a->sink_tokens : begin;
    if (attend_range(a, s, table, head, rows, 0, sinks, position, last)) return 1;
    if (attend_range(a, s, table, head, rows, begin, last + 1, position, last)) return 1;
    for (int m = 0; m < rows; m++) {
        int64_t token = start + first_query + m / group, query_head = head * group + m % group;
        char *to = a->output + (token * a->heads * group + query_head) * a->value_size * bytes;
        const float *from = s->out + m * out_size, factor = 1.0f / sum_of(s->total[m]);
        for (int v = 0; v < a->value_size; v++) store_one(a->query_dtype, to + v * bytes, from[v] * factor);
    }
    return 0;
}

INLINE void write_row(int to_dtype, char *to, ptrdiff_t stride, int from_dtype, const char *from, int size) {
    if (to_dtype == from_dtype && to_dtype == FLOAT32) {
        for (int e = 0; e < size; e++) memcpy(to + e * stride * 4, from + e * 4, 4);
    } else if (to_dtype == from_dtype) {
        for (int e = 0; e < size; e++) memcpy(to + e * stride * 2, from + e * 2, 2);
    } else {
        for (int e = 0; e < size; e++)
            store_one(to_dtype, to + e * stride * item_bytes(to_dtype),
                      load_one(from_dtype, from + e * item_bytes(from_dtype)));
    }
}

/* Writes the new rows of tokens first .. last - 1 of the batch. Returns 0, or 1 when a token has no page. */
static int write_rows(const arguments *a, int first, int last, int head) {
    const int tile = tile_tokens(a), bytes = item_bytes(a->dtype), from_bytes = item_bytes(a->query_dtype);
    int row = 0;
    for (int low = 0, high = a->step->rows; low < high;) { /* the last row that starts at or before `first` */
        int middle = (low + high) / 2;
        if (a->step->starts[middle] <= first) row = middle, low = middle + 1;
        else high = middle;
    }
    for (int token = first; token < last; token++) {
        while (a->step->starts[row + 1] <= token) row++;
        int64_t position = (int64_t)a->step->lengths[row] - (a->step->starts[row + 1] - token);
        int32_t page = a->step->table[row * a->step->width + position / a->block_tokens];
        if (page < 0) return 1;
        char *base = a->arena + page * a->page_bytes;
        int64_t slot = position % a->block_tokens, in_head = (int64_t)head * a->block_tokens;
        write_row(a->dtype, base + a->key_offset + ((in_head + slot / tile * tile) * a->key_size + slot % tile) * bytes,
                  tile, a->query_dtype, a->key + (token * a->key_token + head * a->key_head) * from_bytes, a->key_size);
        write_row(a->dtype, base + a->value_offset + (in_head + slot) * a->value_size * bytes, 1, a->query_dtype,
                  a->value + (token * a->value_token + head * a->value_head) * from_bytes, a->value_size);
    }
    return 0;
}

#ifdef _OPENMP
#include <omp.h>
#define THREAD omp_get_thread_num()
#else
#define THREAD 0
#endif

/* Returns 0, or 1 when a row that had to be written or read has no page. */
int32_t kvist_attend(const arguments *a) {
    const int limit = queries_per_unit(a->group_size), tokens = a->step->starts[a->step->rows];
    int count = 0, failed = 0, split = 0;
    int64_t work = 0;
    for (int row = 0; row < a->step->rows; row++) {
        int queries = a->step->starts[row + 1] - a->step->starts[row];
        work += (int64_t)queries * a->step->lengths[row];
        split |= queries > limit;
        for (int query = 0; query < queries; query += limit) {
            a->step->units[2 * count] = row;
            a->step->units[2 * count + 1] = query;
            count++;
        }
    }
    work *= (int64_t)a->heads * a->group_size * (a->key_size + a->value_size);
    const int threads = work < PART_WORK ? 1 : a->step->threads;
    (void)threads;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        scratch s;
        float *own = a->scratch + THREAD * a->scratch_floats;
        lay_out(own, (int64_t)a->group_size * limit, a->key_size, a->value_size, &s);
        const int parts = (tokens + CHUNK - 1) / CHUNK;
        if (split) {
            /* A unit will read rows that another thread writes: all writing first, then a barrier. */
#pragma omp for schedule(static) reduction(| : failed)
            for (int i = 0; i < parts * a->heads; i++) {
                int first = i / a->heads * CHUNK;
                failed |= write_rows(a, first, first + CHUNK < tokens ? first + CHUNK : tokens, i % a->heads);
            }
        }
#pragma omp for schedule(dynamic) reduction(| : failed)
        for (int i = 0; i < count * a->heads; i++) {
            const int32_t *unit = a->step->units + 2 * (i / a->heads), *start = a->step->starts + unit[0];
            if (!split) failed |= write_rows(a, start[0], start[1], i % a->heads);
            failed |= attend_unit(a, &s, unit[0], unit[1], i % a->heads);
        }
    }
    return failed;
}
