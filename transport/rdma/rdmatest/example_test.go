package rdmatest_test

import (
	"fmt"

	"github.com/fared/fared/transport/internal/wire"
	"github.com/fared/fared/transport/rdma/rdmatest"
	"github.com/fared/fared/transport/roce"
)

// The model posts operations of every kind on RoCEv2 queue pairs, while a network in virtual time drops a tenth of the
// datagrams. An error would be a deviation from the specification.
func ExampleRunSets() {
	transport := func(out wire.Out) rdmatest.Core { return roce.NewCore(roce.Config{}, out) }
	options := rdmatest.SetOptions{Options: rdmatest.Options{Ops: 500, Loss: 0.1}}
	result, err := rdmatest.RunSets(transport, options)
	fmt.Println(result.Ops, "operations,", err)
	fmt.Println("datagrams were dropped:", result.Net.Lost > 0)
	// Output:
	// 500 operations, <nil>
	// datagrams were dropped: true
}
