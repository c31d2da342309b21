package config

import (
	"fmt"
	"slices"
	"testing"

	"github.com/fared/fared/wecmp"
)

// TestTableServices checks the default of slots.services: the first steered service, and RoCEv2's, for which
// libfared-verbs reads the table.
func TestTableServices(t *testing.T) {
	for _, test := range []struct {
		udp, tcp []uint16
		listed   []string
		want     string
	}{
		{[]uint16{4791, 4444}, []uint16{4793}, nil, "[UDP 4791]"},
		{[]uint16{4444, 4791}, nil, nil, "[UDP 4444 UDP 4791]"},
		{[]uint16{4444}, nil, nil, "[UDP 4444]"},
		{nil, []uint16{4793}, nil, "[TCP 4793]"},
		{nil, nil, nil, "[]"},
		{[]uint16{4791, 4444}, nil, []string{"udp/4444"}, "[UDP 4444]"},
	} {
		c := &Config{Dataplane: Dataplane{UDPPorts: test.udp, TCPPorts: test.tcp, TCPPortRange: "none"}, SlotTable: SlotTable{Services: test.listed}}
		if got := fmt.Sprint(c.TableServices()); got != test.want {
			t.Errorf("UDP %v, TCP %v, %q: %s, want %s", test.udp, test.tcp, test.listed, got, test.want)
		}
	}
}

// TestServicesSteered checks which services a configuration steers.
func TestServicesSteered(t *testing.T) {
	d := &Dataplane{UDPPorts: []uint16{4791}, TCPPorts: []uint16{4793}, TCPPortRange: "4800-4802"}
	var got []wecmp.Service
	for _, protocol := range []uint8{wecmp.ProtocolTCP, wecmp.ProtocolUDP} {
		for port := uint16(4790); port < 4804; port++ {
			if s := (wecmp.Service{Protocol: protocol, Port: port}); d.steers(s) {
				got = append(got, s)
			}
		}
	}
	if want := []wecmp.Service{{Protocol: 6, Port: 4793}, {Protocol: 6, Port: 4800}, {Protocol: 6, Port: 4801}, {Protocol: 6, Port: 4802}, {Protocol: 17, Port: 4791}}; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}
