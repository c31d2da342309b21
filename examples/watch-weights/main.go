// Command watch-weights follows the weights of a GPU server's fared and prints one line for each change. It is an
// example of a client of fare.v1.WeightService, by package client, such as the owner of an RDMA NIC's queue pairs.
//
//	watch-weights -socket /run/fared/fared-ro.sock
//
// A line has the revision, the destination, its source loopbacks, and the weight of each plane:
//
//	12 10.255.0.2/32 from 10.255.0.1/32 p0=2 p1=2 p2=1 p3=2 in effect
//	13 10.255.0.3/32 from 10.255.0.1/32 removed
//
// The program waits for a daemon that is not running, and resumes after the last complete revision when a connection
// fails. A daemon that was restarted sends a snapshot; its rows are compared with the printed ones, so that each line
// is a change.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/client"
)

func main() {
	socket := flag.String("socket", client.DefaultSocket, "unix socket of the daemon")
	destination := flag.String("destination", "", "only this destination: an address or a covering prefix; empty means all")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	filter := &farev1.WeightFilter{OmitPairs: true}
	if *destination != "" {
		filter.Destinations = []string{*destination}
	}
	if err := follow(ctx, *socket, filter, os.Stdout, os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, "watch-weights:", err)
		os.Exit(1)
	}
}

// follow prints changes until ctx ends. It returns an error that a new connection cannot remedy.
func follow(ctx context.Context, socket string, filter *farev1.WeightFilter, out, log io.Writer) error {
	conn, err := client.Dial(socket)
	if err != nil {
		return err
	}
	defer conn.Close()
	printed := map[client.Key]string{} // the text of each row
	options := client.Options{Filter: filter, Interrupted: func(err error) {
		fmt.Fprintf(log, "watch-weights: %s; resuming\n", status.Convert(err).Message())
	}}
	return client.Watch(ctx, conn, options, func(u *client.Update) error {
		for _, row := range u.Set {
			key, text := client.KeyOf(row), describe(row)
			if printed[key] != text { // a row may differ only in fields that are not printed
				printed[key] = text
				fmt.Fprintf(out, "%d %s from %s %s\n", u.Revision, key.Destination, key.Sources, text)
			}
		}
		for _, key := range u.Removed {
			delete(printed, key)
			fmt.Fprintf(out, "%d %s from %s removed\n", u.Revision, key.Destination, key.Sources)
		}
		return nil
	})
}

// describe returns the weights of a row, and whether the data plane forwards by all of them.
func describe(row *farev1.DestinationWeights) string {
	if !row.Reachable {
		return "unreachable: " + row.Reason
	}
	var b strings.Builder
	state := "in effect"
	for _, p := range row.Planes {
		fmt.Fprintf(&b, "%s=%d ", p.Plane, p.Weight)
		if !p.InEffect {
			state = "pending"
		}
	}
	if row.NotInEffect != "" {
		state = row.NotInEffect
	}
	return b.String() + state
}
