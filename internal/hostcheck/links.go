package hostcheck

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Link is a device of the network namespace by the kernel's name, which rules and sysctls have, and its index, 0 if
// there is no such device. Master is the name of the VRF, bridge or bond that it belongs to, "" without one.
type Link struct {
	Name   string
	Index  int
	MTU    uint32
	Master string
}

// JudgeLinks returns the findings about the devices of all sub-ports: different MTUs, and devices that belong to
// others.
func JudgeLinks(links []Link) (out []Finding) {
	by := map[uint32][]string{}
	var masters, enslaved []string
	for _, l := range links {
		by[l.MTU] = append(by[l.MTU], l.Name)
		if l.Master != "" {
			masters, enslaved = append(masters, l.Name+" to "+l.Master), append(enslaved, l.Name)
		}
	}
	if sizes := slices.Sorted(maps.Keys(by)); len(sizes) > 1 {
		var parts []string
		for _, size := range sizes {
			parts = append(parts, fmt.Sprintf("%d on %s", size, strings.Join(by[size], ", ")))
		}
		out = append(out, Finding{ReasonMTU,
			fmt.Sprintf("sub-ports have different MTUs (%s): larger packets are cut or dropped when a flow takes the smaller one", strings.Join(parts, "; ")),
			fmt.Sprintf("set the MTU %d on all", sizes[len(sizes)-1])})
	}
	if enslaved != nil {
		out = append(out, Finding{ReasonEnslaved,
			fmt.Sprintf("a sub-port belongs to a VRF, bridge or bond (%s): packets that arrive by it do not reach the loopbacks, or leave by other devices", strings.Join(masters, ", ")),
			fmt.Sprintf("remove it (ip link set %s nomaster), or make the bond the sub-port", enslaved[0])})
	}
	return out
}

// JudgeLoopbacks returns the finding about loopbacks that are on no device, nil without any.
func JudgeLoopbacks(absent []string) []Finding {
	if len(absent) == 0 {
		return nil
	}
	return []Finding{{ReasonLoopback,
		fmt.Sprintf("a loopback is on no device (%s): packets to it are not accepted, and packets from it cannot be sent", strings.Join(absent, ", ")),
		fmt.Sprintf("add it: ip addr add %s dev lo", absent[0])}}
}
