package status

import (
	"fmt"
	"strings"
	"testing"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// TestServicesAreChecked checks that services are refused with their position, the reason and the remedy.
func TestServicesAreChecked(t *testing.T) {
	layout := &Layout{Services: []ServiceRange{{17, 4791, 4791}, {6, 4793, 4793}, {6, 4800, 5055}}}
	udp := func(port uint32) *farev1.Service { return &farev1.Service{Protocol: 17, Port: port} }
	tcp := func(port uint32) *farev1.Service { return &farev1.Service{Protocol: 6, Port: port} }
	var nine []*farev1.Service
	for i := range uint32(9) {
		nine = append(nine, tcp(4800+i))
	}
	for _, c := range []struct {
		services []*farev1.Service
		layout   *Layout
		want     string // "" accepts
	}{
		{nil, layout, ""},
		{nine[:8], layout, ""},
		{[]*farev1.Service{udp(4791), tcp(4793), tcp(4800), tcp(5055)}, layout, ""},
		{nine, layout, "services: 9 are too many: ask for at most 8, and split the request"},
		{[]*farev1.Service{udp(4791), udp(4444)}, layout,
			"services[1]: UDP 4444 is not steered, only UDP 4791, TCP 4793, TCP 4800-5055: add 4444 to dataplane.udp_ports and restart fared, or use a steered port"},
		{[]*farev1.Service{tcp(4791)}, layout, "services[0]: TCP 4791 is not steered, only UDP 4791, TCP 4793, TCP 4800-5055: add 4791 to dataplane.tcp_ports and restart fared"},
		{[]*farev1.Service{tcp(5056)}, layout, "services[0]: TCP 5056 is not steered"},
		{[]*farev1.Service{tcp(4793), tcp(4793)}, layout, "services[1]: TCP 4793 is listed twice"},
		{[]*farev1.Service{{Port: 4791}}, layout, "services[0]: protocol 0 is neither UDP (17) nor TCP (6)"},
		{[]*farev1.Service{udp(0), udp(65536 + 4791)}, layout, "services[0]: UDP 0: a port is from 1 to 65535; services[1]: UDP 70327: a port is from 1 to 65535"},
		{[]*farev1.Service{udp(4791)}, &Layout{}, "services[0]: UDP 4791 is not steered, because this node steers nothing: ask a server"},
	} {
		got, errs := parseServices(c.services, c.layout)
		if c.want == "" {
			if len(errs) != 0 || len(got) != len(c.services) {
				t.Errorf("%v: %v, %v", c.services, got, errs)
			}
			continue
		}
		if !strings.HasPrefix(fmt.Sprint(errs), c.want) {
			t.Errorf("%v:\n%v, want\n%s", c.services, errs, c.want)
		}
	}
}
