/* The records of the libraries that stand in for libibverbs and libmlx5. */
#ifndef FAKE_H
#define FAKE_H

#include <stdint.h>

#define FAKE_CALLS 65536

/* A change of a source port. */
struct fake_call {
	uint32_t qp_num;
	uint16_t port;
	int64_t ns; /* CLOCK_MONOTONIC */
};

struct fake {
	int fail;       /* error of the next call; 0: none */
	int modified;   /* calls of ibv_modify_qp */
	int queried;    /* calls of ibv_query_gid */
	uint32_t label; /* of the last address vector */
	const void *closed;
	int error;         /* result of a change of the address vector alone, as of a connected queue pair */
	int other;         /* such changes with another vector than that of the program */
	_Atomic int calls; /* such changes, FAKE_CALLS of which are recorded */
	struct fake_call call[FAKE_CALLS];
};

extern struct fake fake;

struct fake_mlx5 {
	int other;         /* devices are of another driver */
	int error;         /* result of mlx5dv_modify_qp_udp_sport */
	int delay_us;      /* its duration */
	int raised;        /* a signal that it raises; 0: none */
	_Atomic int calls; /* of it, FAKE_CALLS of which are recorded */
	struct fake_call call[FAKE_CALLS];
};

#endif
