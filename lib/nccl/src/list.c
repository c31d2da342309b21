#include "comm.h"

void list_add(struct list *l, struct stripe *s)
{
	s->list = l;
	s->next = NULL;
	s->previous = l->last;
	if (l->last)
		l->last->next = s;
	else
		l->first = s;
	l->last = s;
	l->bytes += s->length;
}

void list_remove(struct stripe *s)
{
	struct list *l = s->list;
	if (!l)
		return;
	if (s->previous)
		s->previous->next = s->next;
	else
		l->first = s->next;
	if (s->next)
		s->next->previous = s->previous;
	else
		l->last = s->previous;
	l->bytes -= s->length;
	s->list = NULL;
	s->next = s->previous = NULL;
}
