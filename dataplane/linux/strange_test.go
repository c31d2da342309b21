package linux

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/fared/fared/internal/testkit/netnstest"
)

// TestStrangeRoutes checks that marked routes of an unexpected form are removed from the Driver's table, and only from
// there.
func TestStrangeRoutes(t *testing.T) {
	h := newHost(t, 2)
	h.config.AuditInterval = time.Hour
	d, c := h.start()
	s := program(t, c.server)
	s.do(h.group(1, 1, 1), destination(target4(0), 1))
	if err := d.Settle(); err != nil {
		t.Fatal(err)
	}
	rest(t, d)
	want := strings.TrimSpace(h.IP("route", "show", "proto", "179"))
	group := fmt.Sprint(d.state.have.groups[groupKey{1, v4}].id)
	h.IP("route", "add", "10.9.0.1/32", "nhid", group, "proto", "179", "metric", "20", "table", "5555")
	for _, line := range []string{
		"route add 10.254.0.1/32 nhid " + group + " proto 179 metric 30",
		"route add 10.254.0.2/31 nhid " + group + " proto 179 metric 20",
		"route add blackhole 10.254.0.4/32 proto 179 metric 20",
		"route add " + target4(0) + " nhid " + group + " proto 179 metric 30",
		"route change " + target4(0) + " nhid " + group + " proto 179 metric 20 src 10.1.0.1",
	} {
		h.IP(strings.Fields(line)...)
		netnstest.Eventually(t, time.Minute, func() error {
			if got := strings.TrimSpace(h.IP("route", "show", "proto", "179")); got != want {
				return fmt.Errorf("after ip %s\n%s\nwant\n%s", line, got, want)
			}
			return nil
		})
	}
	d.audit()
	if n := d.Stats().RouteObjects; n != 2 {
		t.Errorf("%d routes are counted, want one and the anchor of its group", n)
	}
	if text := h.IP("route", "show", "table", "5555"); !strings.Contains(text, "10.9.0.1") {
		t.Errorf("a route of another table was removed:\n%s", text)
	}
}

// TestCommitReadsNothing checks that a change without a refusal does not read back the kernel state.
func TestCommitReadsNothing(t *testing.T) {
	h := newHost(t, 2)
	h.config.AuditInterval = time.Hour
	d, c := h.start()
	s := program(t, c.server)
	before := d.Stats()
	s.do(h.group(1, 1, 1), destination(target4(0), 1))
	s.do(h.group(1, 1, 2))
	if after := d.Stats(); after.Resyncs != before.Resyncs || after.Retries != before.Retries {
		t.Errorf("%+v, before %+v", after, before)
	}
}
