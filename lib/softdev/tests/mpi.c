/* Checks each element of collectives, messages and one-sided access of MPI, from 4 bytes to 4 MB a rank. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

static int rank, size;

/* Each function returns the number of wrong elements. */
static long reduce(int *a, int *b, int n)
{
	long bad = 0;
	for (int i = 0; i < n; i++)
		a[i] = rank + i;
	MPI_Allreduce(a, b, n, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
	for (int i = 0; i < n; i++)
		bad += b[i] != size * (size - 1) / 2 + size * i;
	return bad;
}

static long exchange(int *a, int *b, int n)
{
	long bad = 0;
	for (int i = 0; i < n * size; i++)
		a[i] = rank * 1000 + i / n;
	MPI_Alltoall(a, n, MPI_INT, b, n, MPI_INT, MPI_COMM_WORLD);
	for (int i = 0; i < n * size; i++)
		bad += b[i] != i / n * 1000 + rank;
	return bad;
}

static long pass(int *a, int *b, int n)
{
	long bad = 0;
	int before = (rank + size - 1) % size;
	for (int i = 0; i < n; i++)
		a[i] = rank * 7 + i;
	MPI_Sendrecv(a, n, MPI_INT, (rank + 1) % size, 5, b, n, MPI_INT, before, 5, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
	for (int i = 0; i < n; i++)
		bad += b[i] != before * 7 + i;
	return bad;
}

static long put(int *a, int *b, int n)
{
	long bad = 0;
	MPI_Win w;
	for (int i = 0; i < n; i++) {
		a[i] = rank * 3 + i;
		b[i] = -1;
	}
	MPI_Win_create(b, n * (MPI_Aint)sizeof *b, sizeof *b, MPI_INFO_NULL, MPI_COMM_WORLD, &w);
	MPI_Win_fence(0, w);
	MPI_Put(a, n, MPI_INT, (rank + 1) % size, 0, n, MPI_INT, w);
	MPI_Win_fence(0, w);
	for (int i = 0; i < n; i++)
		bad += b[i] != (rank + size - 1) % size * 3 + i;
	MPI_Win_free(&w);
	return bad;
}

int main(int argc, char **argv)
{
	long bad = 0;
	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &size);
	for (int n = 1; n <= 1 << 20; n *= 4) {
		int *a = malloc((size_t)n * (size_t)size * sizeof *a), *b = malloc((size_t)n * (size_t)size * sizeof *b);
		if (!a || !b)
			MPI_Abort(MPI_COMM_WORLD, 1);
		bad += reduce(a, b, n) + exchange(a, b, n) + pass(a, b, n) + put(a, b, n);
		free(a);
		free(b);
	}
	printf(bad ? "rank %d: %ld elements are wrong\n" : "rank %d: right\n", rank, bad);
	MPI_Finalize();
	return bad != 0;
}
