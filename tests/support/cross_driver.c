/* Runs calls of the library that a file describes, and writes the memory that they leave.
 *
 * The file: numbers of relocations, calls and bytes; relocations (where a pointer lies, what it points at); calls
 * (function, arguments, whether each argument is a pointer, as bits); the bytes. All numbers are 64-bit little-endian.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int draftree_pass(const void *, void *);
void draftree_pack(const void *, int64_t, int64_t, int64_t, void *, int64_t, int64_t, int64_t, float *, int32_t *);
void draftree_quantize(const void *, int64_t, int64_t, int64_t, void *, const int64_t *);
void draftree_pack_blocks(const uint8_t *, int64_t, const int64_t *, int64_t, int64_t, void *, const int64_t *);
void draftree_unpack(const void *, int64_t, int64_t, float *);
const char *draftree_layout(void);
const char *draftree_instructions(void);

enum { PASS, PACK, QUANTIZE, PACK_BLOCKS, UNPACK, MOST_ARGUMENTS = 10 };

typedef struct {
    int64_t function, arguments[MOST_ARGUMENTS], pointers;
} Call;

static int fail(const char *why) {
    fprintf(stderr, "%s\n", why);
    return 1;
}

static int run(const Call *call, char *bytes) {
    int64_t at[MOST_ARGUMENTS];
    void *to[MOST_ARGUMENTS];
    for (int i = 0; i < MOST_ARGUMENTS; i++) {
        at[i] = call->arguments[i];
        to[i] = call->pointers >> i & 1 ? bytes + at[i] : NULL;
    }
    switch (call->function) {
        case PASS: return draftree_pass(to[0], to[1]);
        case PACK:
            draftree_pack(to[0], at[1], at[2], at[3], to[4], at[5], at[6], at[7], to[8], to[9]);
            return 0;
        case QUANTIZE: draftree_quantize(to[0], at[1], at[2], at[3], to[4], to[5]); return 0;
        case PACK_BLOCKS:
            draftree_pack_blocks(to[0], at[1], to[2], at[3], at[4], to[5], to[6]);
            return 0;
        case UNPACK: draftree_unpack(to[0], at[1], at[2], to[3]); return 0;
    }
    return 1;
}

int main(int count, char **names) {
    int64_t sizes[3];
    FILE *file;
    printf("%s\n%s", draftree_instructions(), draftree_layout());
    if (count != 3) return fail("names of the file and of the result are missing");
    if ((file = fopen(names[1], "rb")) == NULL) return fail("the file cannot be opened");
    if (fread(sizes, 8, 3, file) != 3) return fail("the file is short");
    int64_t *moves = malloc((size_t)sizes[0] * 16);
    Call *calls = malloc((size_t)sizes[1] * sizeof(Call));
    char *bytes = aligned_alloc(4096, ((size_t)sizes[2] + 4095) / 4096 * 4096);
    if (moves == NULL || calls == NULL || bytes == NULL) return fail("no memory");
    if (fread(moves, 16, (size_t)sizes[0], file) != (size_t)sizes[0] ||
        fread(calls, sizeof(Call), (size_t)sizes[1], file) != (size_t)sizes[1] ||
        fread(bytes, 1, (size_t)sizes[2], file) != (size_t)sizes[2])
        return fail("the file is short");
    fclose(file);
    for (int64_t i = 0; i < sizes[0]; i++) {
        char *to = bytes + moves[2 * i + 1];
        memcpy(bytes + moves[2 * i], &to, sizeof(to));
    }
    for (int64_t i = 0; i < sizes[1]; i++)
        if (run(calls + i, bytes)) return fail("a call failed");
    if ((file = fopen(names[2], "wb")) == NULL) return fail("the result cannot be opened");
    if (fwrite(bytes, 1, (size_t)sizes[2], file) != (size_t)sizes[2]) return fail("the disk is full");
    return fclose(file) ? fail("the disk is full") : 0;
}
