package slots_test

import (
	"fmt"
	"net/netip"

	"github.com/fared/fared/client/slots"
)

// A sender distributes ten messages over the slots of a pair by their shares. The file is a table of a server with two
// planes of two sub-ports.
func ExampleTable_Lookup() {
	table, err := slots.Open("../../internal/slotfile/testdata/v2.slots") // "" is the table of this machine
	if err != nil {
		fmt.Println(err)
		return
	}
	defer table.Close()
	pair, err := table.Lookup(netip.MustParseAddr("10.255.0.1"), netip.MustParseAddr("10.255.0.2"), nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	for i, s := range pair.Slots {
		fmt.Printf("slot %d: plane %s, source port %d, %d ppb\n", i, table.Planes()[s.Plane], s.SourcePort, s.Share)
	}
	var chooser slots.Chooser
	for range 6 {
		fmt.Print(chooser.Next(pair.Slots), " ")
	}
	fmt.Println("by share,", slots.ForKey(pair.Slots, 0x1000), "for address 0x1000")
	// Output:
	// slot 0: plane p0, source port 50000, 333333334 ppb
	// slot 1: plane p1, source port 50001, 166666667 ppb
	// slot 2: plane p0, source port 50002, 333333333 ppb
	// slot 3: plane p1, source port 50003, 166666666 ppb
	// 0 2 1 3 0 2 by share, 0 for address 0x1000
}
