package dptest_test

import (
	"context"
	"fmt"

	"github.com/fared/fared/api/dptest"
	"github.com/fared/fared/dataplane/memory"
)

// A program runs selected cases of the suite over a connection to any data plane; a Go test would call Run.
func ExampleCheck() {
	conn, err := memory.Dial(memory.New(memory.Config{}))
	if err != nil {
		fmt.Println(err)
		return
	}
	defer conn.Close()
	options := dptest.Options{Only: []string{"acknowledgements", "sub-port-fast-path", "flow-pins"}}
	err = dptest.Check(context.Background(), conn, options, func(r dptest.Result) { fmt.Printf("%s: %v\n", r.Name, r.Status) })
	fmt.Println(err)
	// Output:
	// acknowledgements: passed
	// sub-port-fast-path: passed
	// flow-pins: not applicable
	// <nil>
}
