package dpclient

// fifo is a queue that reuses its array. The zero value is empty.
type fifo[T any] struct {
	items []T
	head  int
}

// keep is the capacity of the largest array that an empty queue retains; a larger one, left by a burst, is released.
const keep = 4096

func (q *fifo[T]) len() int { return len(q.items) - q.head }

// at returns the i-th element from the front.
func (q *fifo[T]) at(i int) *T { return &q.items[q.head+i] }

func (q *fifo[T]) push(item T) {
	if q.head > 0 && len(q.items) == cap(q.items) && q.head >= len(q.items)/2 {
		n := copy(q.items, q.items[q.head:])
		clear(q.items[n:])
		q.items, q.head = q.items[:n], 0
	}
	q.items = append(q.items, item)
}

// pop removes the first element; the queue must not be empty.
func (q *fifo[T]) pop() T {
	var zero T
	item := q.items[q.head]
	q.items[q.head] = zero
	q.head++
	if q.head == len(q.items) {
		q.reset()
	}
	return item
}

func (q *fifo[T]) reset() {
	clear(q.items)
	q.items, q.head = q.items[:0], 0
	if cap(q.items) > keep {
		q.items = nil
	}
}
