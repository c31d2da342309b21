package superp

// fifo is a queue that no longer allocates once it has grown. The zero value is empty.
type fifo[T any] struct {
	ring []T // its length is a power of two
	head int
	n    int
}

func (q *fifo[T]) push(x T) {
	if q.n == len(q.ring) {
		ring := make([]T, max(8, 2*len(q.ring)))
		for i := range q.n {
			ring[i] = *q.at(i)
		}
		q.ring, q.head = ring, 0
	}
	q.n++
	*q.at(q.n - 1) = x
}

// at returns element i of the queue; pop returns element 0.
func (q *fifo[T]) at(i int) *T { return &q.ring[(q.head+i)&(len(q.ring)-1)] }

func (q *fifo[T]) pop() T {
	var zero T
	x := *q.at(0)
	*q.at(0) = zero
	q.head = (q.head + 1) & (len(q.ring) - 1)
	q.n--
	return x
}
