/* A libmlx5.so.1 of two functions, which records the calls of one. */
#include <errno.h>
#include <infiniband/verbs.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <time.h>
#include <unistd.h>

#include "fake.h"

struct fake_mlx5 fake_mlx5;

bool mlx5dv_is_supported(struct ibv_device *device)
{
	return device && !fake_mlx5.other;
}

int mlx5dv_modify_qp_udp_sport(struct ibv_qp *qp, uint16_t port)
{
	if (qp->state != IBV_QPS_RTS || (qp->qp_type != IBV_QPT_RC && qp->qp_type != IBV_QPT_UC))
		return EINVAL;
	if (fake_mlx5.delay_us)
		usleep((useconds_t)fake_mlx5.delay_us);
	if (fake_mlx5.raised)
		raise(fake_mlx5.raised);
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	int n = atomic_load(&fake_mlx5.calls);
	if (n < FAKE_CALLS)
		fake_mlx5.call[n] = (struct fake_call){qp->qp_num, port, (int64_t)now.tv_sec * 1000000000 + now.tv_nsec};
	atomic_store(&fake_mlx5.calls, n + 1);
	return fake_mlx5.error;
}
