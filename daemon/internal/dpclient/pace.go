package dpclient

import "time"

// bulkDelay limits the time that the bulk operations of a paced class in flight may take in the data plane: a prompt
// operation waits for them.
const bulkDelay = 20 * time.Millisecond

// bulkLeast is the initial and least limit of bulk operations of a paced class in flight: a lower limit would not
// reduce the delay on a data plane that takes bulkDelay for any message, and would reduce its throughput.
const bulkLeast = 32

// paced reports whether the bulk operations of a class have a pace: those on vectors. Operations on destinations cost a
// data plane a small fraction of that, and sub-port states are never bulk.
func paced(c Class) bool { return c == VectorSet || c == VectorDelete }

// pace limits the bulk operations of a class in flight to the number that the data plane applies within bulkDelay,
// measured on operations that fill the limit, from sending to answer. The zero value is a new pace.
type pace struct {
	limit, flying int
	sample        uint64    // ID of the measured operation; 0 if none is being measured
	sent          time.Time // of sample
}

// allows reports whether another operation may be sent.
func (p *pace) allows() bool {
	if p.limit == 0 {
		p.limit = bulkLeast
	}
	return p.flying < p.limit
}

// send counts a sent operation.
func (p *pace) send(id uint64, now time.Time) {
	p.flying++
	if p.sample == 0 && p.flying == p.limit {
		p.sample, p.sent = id, now
	}
}

// answer counts the answer to an operation. After the measured operation, which has waited for a full limit, it scales
// the limit to bulkDelay: down as far as bulkLeast, up at most to the double. atMost is the largest limit.
func (p *pace) answer(id uint64, now time.Time, atMost int) {
	p.flying--
	if id != p.sample {
		return
	}
	p.sample = 0
	fits := 2 * p.limit
	if took := now.Sub(p.sent); took > 0 {
		fits = int(min(int64(fits), int64(p.limit)*int64(bulkDelay)/int64(took)))
	}
	p.limit = max(bulkLeast, min(fits, atMost))
}
