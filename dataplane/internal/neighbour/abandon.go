// Package neighbour tells the kernel what has become of next hops.
package neighbour

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Abandon makes the kernel give up asking for addresses on a device that has lost its carrier, and drop the packets that wait
// for the answer. The kernel itself asks three times, a second apart (net/core/neighbour.c), and for as long TCP sends nothing
// again of what it has in the queue (skb_still_in_host_queue, net/ipv4/tcp_output.c), although its route leads elsewhere by
// then: a connection whose plane died would stand still for three seconds. To be called when nothing is sent that way any more.
//
// Only entries that are being asked for go: NUD_INCOMPLETE. What somebody has set stays. A device that is not there has none.
func Abandon(h *netlink.Handle, device int) error {
	var errs []error
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		all, err := h.NeighList(device, family)
		if err != nil && !errors.Is(err, unix.ENODEV) {
			errs = append(errs, err)
		}
		for i := range all {
			if all[i].LinkIndex != device || all[i].State != netlink.NUD_INCOMPLETE {
				continue
			}
			err := h.NeighDel(&netlink.Neigh{LinkIndex: device, Family: family, IP: all[i].IP})
			if err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ENODEV) {
				errs = append(errs, err)
			}
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("packets that wait for a next hop on device %d cannot be dropped: %w", device, err)
	}
	return nil
}
