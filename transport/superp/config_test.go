package superp

import (
	"strings"
	"testing"
	"time"

	"github.com/fared/fared/transport/rdma"
)

func TestResolve(t *testing.T) {
	c, err := Config{}.Resolve()
	if err != nil || c.Port != 4444 || c.Payload != 1024 || c.HeadSize != 20 || c.maxOp() != 64<<10 || c.Timing.GiveUp != 30*time.Second {
		t.Errorf("defaults: %+v, longest operation %d, %v", c, c.maxOp(), err)
	}
	if again, err := c.Resolve(); err != nil || again != c {
		t.Errorf("resolved again: %+v, %v", again, err)
	}
	none, err := Config{HeadSize: -1, Parameters: Parameters{Proactive: -5}}.Resolve()
	if again, err2 := none.Resolve(); err != nil || err2 != nil || again != none {
		t.Errorf("none resolved: %+v, %v; again: %+v, %v", none, err, again, err2)
	}
	if c := NewCore(none, nil); c.cfg.HeadSize != 0 || c.cfg.Parameters.Proactive != 0 || c.cfg.maxOp() != 65<<10 {
		t.Errorf("no head and nothing proactive: %+v", c.cfg)
	}
	for field, c := range map[string]Config{
		"Payload":                          {Payload: 63},
		"HeadSize":                         {HeadSize: rdma.MaxHead + 1},
		"TrafficClass":                     {TrafficClass: 2},
		"Parameters.Window":                {Parameters: Parameters{Window: 15}},
		"Parameters.ReceiveWindow":         {Parameters: Parameters{ReceiveWindow: 1025}},
		"Parameters.Buffers":               {Parameters: Parameters{Buffers: 63}},
		"Parameters.Proactive":             {Parameters: Parameters{Proactive: 65}},
		"Parameters.MaxRetransmits":        {Parameters: Parameters{MaxRetransmits: -1}},
		"Parameters.Stretch":               {Parameters: Parameters{Stretch: -1}},
		"Parameters.Reorder":               {Parameters: Parameters{Reorder: -1}},
		"Parameters.Transactions":          {Parameters: Parameters{Transactions: 1025}},
		"Parameters.PacketsPerTransaction": {Parameters: Parameters{PacketsPerTransaction: 4097}},
		"Parameters.OpsPerPacket":          {Parameters: Parameters{OpsPerPacket: 16}},
		"Parameters.TransactionTimeout":    {Parameters: Parameters{TransactionTimeout: -1}},
	} {
		if _, err := c.Resolve(); err == nil || !strings.HasPrefix(err.Error(), field+": ") {
			t.Errorf("%s: %v", field, err)
		}
	}
}

// TestFIFO compares the queue with a slice.
func TestFIFO(t *testing.T) {
	var q fifo[int]
	var want []int
	for i := range 10000 {
		if i*7919%13 < 7 || len(want) == 0 {
			q.push(i)
			want = append(want, i)
		} else {
			if got := q.pop(); got != want[0] {
				t.Fatalf("popped %d, want %d", got, want[0])
			}
			want = want[1:]
		}
		if q.n != len(want) || q.n > 0 && (*q.at(0) != want[0] || *q.at(q.n - 1) != want[len(want)-1]) {
			t.Fatalf("%d in the queue, want %d", q.n, len(want))
		}
	}
}
