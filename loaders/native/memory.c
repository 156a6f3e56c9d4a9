/* Memory that grows on demand, and is kept from sample to sample. */
#include "core.h"

#include <stdlib.h>

void *dt_reserve(dt_buffer *buffer, size_t size)
{
    if (buffer->data == NULL || buffer->size < size) {
        dt_release(buffer);
        if (size > SIZE_MAX / 2)
            return NULL;
        size_t bytes = (size + DT_BLOCK + 63) / 64 * 64;
        buffer->data = aligned_alloc(64, bytes);
        buffer->size = buffer->data == NULL ? 0 : size;
    }
    return buffer->data;
}

void dt_release(dt_buffer *buffer)
{
    free(buffer->data);
    buffer->data = NULL;
    buffer->size = 0;
}
