#include "core.h"

#include <stdlib.h>
#include <string.h>

int sd_table_add(struct sd_table *t, void *object, uint32_t *index)
{
	if (t->used == t->size) {
		uint32_t size = t->size ? 2 * t->size : 64;
		void **objects = realloc(t->objects, size * sizeof *objects);
		if (!objects)
			return ENOMEM;
		memset(objects + t->size, 0, (size - t->size) * sizeof *objects);
		t->objects = objects;
		t->hint = t->size;
		t->size = size;
	}
	while (t->objects[t->hint])
		t->hint = (t->hint + 1) % t->size;
	*index = t->hint;
	t->objects[t->hint] = object;
	t->hint = (t->hint + 1) % t->size;
	t->used++;
	return 0;
}

void sd_table_remove(struct sd_table *t, uint32_t index)
{
	t->objects[index] = NULL;
	t->used--;
}

struct sd_qp *sd_find_qp(const struct sd_dev *dev, uint32_t qpn)
{
	uint32_t index = qpn & ((1 << SD_QPN_GENERATION) - 1);
	struct sd_qp *qp = index > SD_MANAGEMENT_QPN ? sd_table_get(&dev->qps, index - 2) : NULL;
	return qp && qp->ex.qp_base.qp_num == qpn ? qp : NULL;
}
