/* The kernel of products_bytes.h for 16 registers of 256 bits: they hold the sums of a group, and
 * sums of groups are in memory. The results have the same bits. */
#pragma once

INLINE void add_int8(Piece piece, int num_rows, int count) {
    const int64_t first = piece.from / BYTES_OF_GROUP, end = blocks_of(piece.to, BYTES_OF_GROUP);
    const ByteGroup *input[MOST_ROWS];
    EACH_ROW(r) input[r] = byte_groups(piece.work, piece.row + r, piece.linear->inputs);
    START_PREFETCH;
    for (int64_t group = first; group < end; group++) {
        RENEW_PREFETCH;
        part_i sums[SUMS_AT_ONCE];
        EACH_ROW(r)
            EACH_PART(i) sums[PART_OF(r, i)] = (part_i){0} + input[r][group].start;
        UNROLLED for (int quad = 0; quad < BYTES_OF_GROUP / 4; quad++) {
            const int64_t at = group * 512 + quad * 64;
            part_i w[GROUP * PARTS];
            PREFETCH(quad);
            EACH_PART(i) /* signed bytes become unsigned, 128 larger */
                w[i] = load_part(piece.weight + i / PARTS * piece.stride + at + i % PARTS * WIDTH) ^
                       (part_i)((part_u){0} + 0x80808080u);
            EACH_ROW(r) {
                const part_i a = broadcast_part((const char *)input[r][group].bytes + quad * 4);
                EACH_PART(i) sums[PART_OF(r, i)] = dot_of_quads(sums[PART_OF(r, i)], w[i], a);
            }
        }
        EACH_ROW(r) {
            const part_f scale = splat_part(input[r][group].scale);
            EACH_PART(i) {
                part_f *total = &piece.partial_sums[r].value[piece.first_part + i];
                *total = fma_part(__builtin_convertvector(sums[PART_OF(r, i)], part_f), scale,
                                  *total);
            }
        }
    }
}
