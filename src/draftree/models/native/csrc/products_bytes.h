/* The kernel of int8 weights and inputs in groups of bytes: sums of a group are exact, and are
 * scaled and added in float32 in the order of the groups. Half of the sums are those of a group. */
#pragma once

INLINE void add_int8(Piece piece, int num_rows, int count) {
    const int64_t first = piece.from / BYTES_OF_GROUP, end = blocks_of(piece.to, BYTES_OF_GROUP);
    const ByteGroup *input[MOST_ROWS];
    part_f totals[SUMS_AT_ONCE / 2];
    EACH_ROW(r) input[r] = byte_groups(piece.work, piece.row + r, piece.linear->inputs);
    EACH_ROW(r)
        EACH_PART(i) totals[PART_OF(r, i)] = piece.partial_sums[r].value[piece.first_part + i];
    START_PREFETCH;
    for (int64_t group = first; group < end; group++) {
        RENEW_PREFETCH;
        part_i sums[SUMS_AT_ONCE / 2];
        EACH_ROW(r)
            EACH_PART(i) sums[PART_OF(r, i)] = (part_i){0} + input[r][group].start;
        UNROLLED for (int quad = 0; quad < BYTES_OF_GROUP / 4; quad++) {
            const int64_t at = group * 512 + quad * 64;
            part_i w[GROUP];
            PREFETCH(quad);
            EACH_PART(i) /* signed bytes become unsigned, 128 larger */
                w[i] = load_part(piece.weight + i * piece.stride + at) ^
                       (part_i)((part_u){0} + 0x80808080u);
            EACH_ROW(r) {
                const part_i a = broadcast_part((const char *)input[r][group].bytes + quad * 4);
                EACH_PART(i)
                    sums[PART_OF(r, i)] = dot_of_quads(sums[PART_OF(r, i)], w[i], a);
            }
        }
        EACH_ROW(r) {
            const part_f scale = splat_part(input[r][group].scale);
            EACH_PART(i)
                totals[PART_OF(r, i)] =
                    fma_part(__builtin_convertvector(sums[PART_OF(r, i)], part_f), scale,
                             totals[PART_OF(r, i)]);
        }
    }
    EACH_ROW(r)
        EACH_PART(i) piece.partial_sums[r].value[piece.first_part + i] = totals[PART_OF(r, i)];
}
