/* The native core's own declarations: what its files share. Everything is plain C11 over libjpeg-turbo; no Python.
 *
 * Functions that Python calls are marked DT_API and listed in library.py. They hold no global state, never exit, and
 * may be called from any number of threads, each with a workspace of its own.
 */
#ifndef DRIVETRAIN_CORE_H
#define DRIVETRAIN_CORE_H

#include <stddef.h>
#include <stdint.h>

#define DT_API __attribute__((visibility("default")))

/* The compiler makes a variant of the function for each instruction set, and the loader chooses one. Results are the
 * same: integers, or floats without contraction. */
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(DT_NO_CLONES)
#define DT_CLONES __attribute__((target_clones("avx512bw", "avx2", "default")))
#else
#define DT_CLONES
#endif

enum { DT_OK = 0, DT_UNDECODABLE = 1, DT_WRONG_SIZE = 2, DT_UNREADABLE = 3, DT_NO_MEMORY = 4 };

/* Part of a picture in memory: `rows` lines of `columns` pixels of `channels` bytes, `stride` bytes apart. */
typedef struct {
    const uint8_t *data;
    size_t stride;
    int64_t rows, columns;
} dt_image;

#endif
