package rdmatest

import (
	"fmt"
	"testing"
	"time"

	"github.com/fared/fared/transport/rdma"
)

// Result holds the statistics of a run.
type Result struct {
	// Ops is the number of completed operations; Time is the duration of the run, in the bed's time.
	Ops  uint64
	Time time.Duration
	// Flaps counts the times that a plane went down or shares changed.
	Flaps int
	// Stalls counts the stalls of the sets' slots.
	Stalls uint64
	// Net holds the network's counters if the bed is a Net; Counters holds those of both transports.
	Net      NetStats
	Counters [2]map[string]uint64
}

// Channels runs the model over a core on a simulated network, and fails the test on any error.
func Channels(t testing.TB, construct Constructor, o Options) Result {
	t.Helper()
	return ChannelsOn(t, Virtual(o.withDefaults().net(), construct), o)
}

// ChannelsOn runs the model on a bed, closes the bed, and fails the test on any error.
func ChannelsOn(t testing.TB, bed Bed, o Options) Result {
	t.Helper()
	result, err := RunChannels(bed, o)
	if err != nil {
		t.Fatalf("%v\noptions: %+v", err, o)
	}
	return result
}

// RunChannels runs the model on a bed and closes the bed. It returns an error in these cases:
//
//   - an operation does not complete exactly once, or with an error, or nothing completes for Options.Idle
//   - an operation completes early: the peer's memory does not hold the written bytes yet, the SEND was not delivered,
//     or the bytes read were at no time in memory
//   - an operation is executed twice, or not in the order that an ordered channel promises, or memory differs from the
//     model's in the end, byte for byte
//   - the transport breaks the contract of rdma.Host (Host.Err)
func RunChannels(bed Bed, o Options) (result Result, err error) {
	m, err := newModel(bed, o)
	if err != nil {
		return result, err
	}
	defer bed.Close()
	begin := bed.Now()
	bed.Lock()
	for side := range m.hosts {
		for _, e := range m.ends[side] {
			e.pump()
		}
	}
	m.settle()
	if m.o.Flap > 0 {
		m.flapLater()
	}
	bed.Unlock()
	if err := m.finish(); err != nil {
		return result, err
	}
	result = m.result(begin)
	return result, m.closing()
}

// finish waits for all completions, then compares memory.
func (m *model) finish() error {
	for idle := 0; ; idle++ { // idle counts turns without a completion. While only parked ends have work left, no operation is outstanding.
		m.bed.Lock()
		before, work := m.done, m.work()
		m.bed.Unlock()
		if !work {
			break
		}
		ok := m.bed.Run(func() bool { return m.done >= before+1000 || !m.work() || m.failure() != nil }, m.o.Idle)
		m.bed.Lock()
		err := m.failure()
		if err == nil && !ok && m.done == before && (len(m.tasks) > 0 || !m.waits() || idle >= 1000) {
			err = fmt.Errorf("no operation has completed for %v: %s", m.o.Idle, m.describe())
		}
		if m.done > before {
			idle = 0
		}
		m.bed.Unlock()
		if err != nil {
			return err
		}
	}
	m.bed.Run(func() bool { return m.failure() != nil }, m.o.Settle)
	m.bed.Lock()
	defer m.bed.Unlock()
	if err := m.failure(); err != nil {
		return err
	}
	if err := m.compare(); err != nil {
		return err
	}
	return m.compareCounts()
}

// work reports whether operations remain to be posted or completed.
func (m *model) work() bool {
	if m.left > 0 {
		return true
	}
	for _, ends := range m.ends {
		for _, e := range ends {
			if e.next != nil || len(e.pending)+len(e.back) > 0 {
				return true
			}
		}
	}
	return false
}

// waits reports whether an end has operations to post but waits for its planes.
func (m *model) waits() bool {
	for _, ends := range m.ends {
		for _, e := range ends {
			if e.parked && (e.next != nil || len(e.back) > 0 || m.left > 0) {
				return true
			}
		}
	}
	return false
}

// describe returns the state of all ends, for failures.
func (m *model) describe() (s string) {
	for _, ends := range m.ends {
		for _, e := range ends {
			s += fmt.Sprintf("\n%v: %d outstanding", e, len(e.pending))
			if len(e.pending) > 0 {
				s += fmt.Sprintf(", the oldest %v (delivered: %v)", e.pending[0], e.pending[0].delivered)
			}
			if e.next != nil {
				s += fmt.Sprintf(", next %v", e.next)
			}
			s += fmt.Sprintf(", refused: %v, parked: %v, thinks: %v", e.full, e.parked, e.paused)
		}
	}
	for _, h := range m.hosts {
		s += fmt.Sprintf("\ncounters of %v: %v", h.address, h.transport.Counters())
	}
	return s
}

// compareCounts compares Path.Sent with the payload of WRITEs and SENDs, counted once each. Transports may differ in
// whether they count heads of SENDs and answers to READs and atomics.
func (m *model) compareCounts() error {
	for side, ends := range m.ends {
		for i, e := range ends {
			sent := uint64(0)
			for _, c := range e.sent {
				sent += c.Load()
			}
			peer := m.ends[1-side][i]
			least, most := e.bytes, e.bytes+peer.read+rdma.MaxHead*e.sends
			if !m.lenient && (sent < least || sent > most) {
				return fmt.Errorf("%v: Path.Sent returns %d bytes of payload, want %d to %d", e, sent, least, most)
			}
		}
	}
	return nil
}

func (m *model) result(begin time.Duration) Result {
	m.bed.Lock()
	defer m.bed.Unlock()
	r := Result{Ops: m.done, Time: m.bed.Now() - begin, Flaps: m.flaps}
	for i, h := range m.hosts {
		r.Counters[i] = h.transport.Counters()
	}
	if v, ok := m.bed.(*virtual); ok {
		r.Net = v.Stats()
	}
	return r
}

// closing closes channels with operations outstanding: these complete before Close returns, and the peer's end does not
// fail the process. Then it closes the remaining channels.
func (m *model) closing() error {
	m.bed.Lock()
	m.lenient = true // from now on operations are flushed
	for _, e := range m.ends[0] {
		for range 4 {
			if !e.parked && !e.full {
				e.next = e.make(rdma.OpWrite, m.size())
				if !e.post() {
					e.next = nil
				}
			}
		}
	}
	m.settle()
	m.bed.Unlock()
	m.bed.Run(func() bool { return false }, 10*time.Microsecond)
	m.bed.Lock()
	defer m.bed.Unlock()
	for side, ends := range m.ends {
		for _, e := range ends {
			e.closed = true
			m.hosts[side].Close(e.ch)
			if len(e.pending) > 0 {
				m.blame("%v has been closed, %d operations have not completed", e, len(e.pending))
			}
		}
		m.settle()
	}
	return m.failure()
}
