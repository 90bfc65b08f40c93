/* y = x W^T + b in bfloat16 with float32 sums, for processors with AVX512_BF16. Compiled and called by packing.py.
 *
 * Weights are packed as [output / 16][input / 2][16 outputs][2 inputs]: one vector is what one instruction multiplies by
 * a pair of inputs. A block of up to 12 rows by 32 outputs keeps its sums in registers, and its rows are arranged as
 * [input / 2][rows][2 inputs] before, so that all pairs come from one stream. Few rows split the inputs instead, for
 * sums that do not wait for each other. Rows are rounded to nearest, ties to even.
 */
#ifndef __AVX512BF16__
#error the processor has no AVX512_BF16
#endif
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { LANES = 16, MOST_TILES = 2, MOST_ROWS = 12, MOST_SPLIT = 4 };

/* Mirrors packing._Arguments. Strides count elements; the last axis of every tensor is contiguous. */
typedef struct {
    const uint16_t *weight, *bias; /* bias may be null */
    int64_t outputs, inputs;
    const uint16_t *input;
    uint16_t *output; /* [rows][outputs] */
    int64_t rows, input_row;
    int32_t *scratch; /* [rows][inputs / 2] */
    int32_t threads;
} arguments;

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

/* Rows of the block that begins at `row`. */
INLINE int block_rows(const arguments *a, int64_t row) {
    const int64_t left = a->rows - row;
    if (a->rows < 4) return left;
    return left >= 12 ? 12 : left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
}

static void arrange(const arguments *a, int64_t first, int rows) {
    const int64_t pairs = a->inputs / 2;
    int32_t *to = a->scratch + first * pairs;
    for (int r = 0; r < rows; r++) {
        const char *from = (const char *)(a->input + (first + r) * a->input_row);
        for (int64_t k = 0; k < pairs; k++) memcpy(to + k * rows + r, from + 4 * k, 4);
    }
}

/* One block. The three counts are constants wherever this is inlined; `split` divides no remainder away: see below. */
INLINE void multiply(const arguments *a, int64_t tile, int64_t first, const int tiles, const int rows, const int split) {
    const int64_t pairs = a->inputs / 2;
    const uint16_t *weight = a->weight + tile * pairs * 2 * LANES;
    const int32_t *x = a->scratch + first * pairs;
    __m512 sum[MOST_SPLIT][MOST_ROWS][MOST_TILES];
    UNROLL for (int s = 0; s < split; s++)
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int t = 0; t < tiles; t++) sum[s][r][t] = _mm512_setzero_ps();
    for (int64_t k = 0; k < pairs; k += split) /* packing.py takes inputs by multiples of 2 * MOST_SPLIT only */
        UNROLL for (int s = 0; s < split; s++) {
            __m512bh w[MOST_TILES];
            UNROLL for (int t = 0; t < tiles; t++)
                w[t] = (__m512bh)_mm512_loadu_si512(weight + (t * pairs + k + s) * 2 * LANES);
            UNROLL for (int r = 0; r < rows; r++) {
                const __m512bh pair = (__m512bh)_mm512_set1_epi32(x[(k + s) * rows + r]);
                UNROLL for (int t = 0; t < tiles; t++) sum[s][r][t] = _mm512_dpbf16_ps(sum[s][r][t], w[t], pair);
            }
        }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int t = 0; t < tiles; t++) {
            const int64_t n = (tile + t) * LANES;
            __m512 y = sum[0][r][t];
            UNROLL for (int s = 1; s < split; s++) y = _mm512_add_ps(y, sum[s][r][t]);
            if (a->bias) {
                const __m512i bias = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)(a->bias + n)));
                y = _mm512_add_ps(y, _mm512_castsi512_ps(_mm512_slli_epi32(bias, 16)));
            }
            _mm256_storeu_si256((void *)(a->output + (first + r) * a->outputs + n), (__m256i)_mm512_cvtneps_pbh(y));
        }
}

INLINE void column(const arguments *a, int64_t tile, const int tiles) {
    for (int64_t row = 0; row < a->rows;) {
        const int rows = block_rows(a, row);
        if (a->rows == 1) multiply(a, tile, row, tiles, 1, 4);
        else if (rows == 12) multiply(a, tile, row, tiles, 12, 1);
        else if (rows == 8) multiply(a, tile, row, tiles, 8, 1);
        else if (rows == 4) multiply(a, tile, row, tiles, 4, 1);
        else if (rows == 3) multiply(a, tile, row, tiles, 3, 2);
        else if (rows == 2) multiply(a, tile, row, tiles, 2, 2);
        else multiply(a, tile, row, tiles, 1, 4);
        row += rows;
    }
}

int64_t kvist_linear_bytes(void) { return sizeof(arguments); }

void kvist_linear(const arguments *a) {
    const int64_t tiles = a->outputs / LANES;
#pragma omp parallel num_threads(a->threads) if (a->threads > 1)
    {
#pragma omp for schedule(static)
        for (int64_t block = 0; block < (a->rows + 11) / 12; block++)
            for (int64_t row = 12 * block; row < a->rows && row < 12 * block + 12; row += block_rows(a, row))
                arrange(a, row, block_rows(a, row));
#pragma omp for schedule(static)
        for (int64_t pair = 0; pair < (tiles + 1) / 2; pair++) {
            if (2 * pair + 2 <= tiles) column(a, 2 * pair, 2);
            else column(a, 2 * pair, 1);
        }
    }
}
