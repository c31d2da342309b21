/* The parts of the client. */
#ifndef CLIENT_H
#define CLIENT_H

#include <infiniband/verbs.h>
#include <stdbool.h>

#include "fake.h"

#define QPS 16384

extern struct ibv_qp *qps[QPS];
extern struct fake_mlx5 *mlx5;

/* Returns the number of threads. */
int tasks(void);
/* Makes a queue pair of the n-th device. */
struct ibv_qp *make(int id, enum ibv_qp_type type, int device);
struct ibv_qp_attr attr_to(const char *destination, uint32_t label, int global, int gid, int port);

/* Obeys a command of forks.c; false: it is none. */
bool forks(const char *command, int n);
/* Is the program that the commands of forks.c execute: it prints what it has inherited, and what a queue pair of it
 * receives. */
int executed(void);

#endif
