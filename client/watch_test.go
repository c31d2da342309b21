package client_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/client"
)

// script is a WeightService whose streams send prepared messages and then fail. The last one waits.
type script struct {
	farev1.UnimplementedWeightServiceServer

	mu       sync.Mutex
	streams  [][]*farev1.WatchWeightsResponse
	requests []string
	err      error // of the streams; nil means UNAVAILABLE
}

func (s *script) WatchWeights(r *farev1.WatchWeightsRequest, stream grpc.ServerStreamingServer[farev1.WatchWeightsResponse]) error {
	s.mu.Lock()
	s.requests = append(s.requests, fmt.Sprintf("%s/%d", r.Instance, r.SinceRevision))
	if len(s.streams) == 0 {
		err := s.err
		s.mu.Unlock()
		if err != nil {
			return err
		}
		<-stream.Context().Done()
		return stream.Context().Err()
	}
	messages := s.streams[0]
	s.streams = s.streams[1:]
	s.mu.Unlock()
	for _, m := range messages {
		if err := stream.Send(m); err != nil {
			return err
		}
	}
	return status.Error(codes.Unavailable, "the daemon stops")
}

// serve serves a script on a unix socket until the test ends.
func serve(t testing.TB, s *script) (socket string) {
	t.Helper()
	dir, err := os.MkdirTemp("", "client") // short enough for a socket
	if err != nil {
		t.Fatal(err)
	}
	socket = filepath.Join(dir, "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	farev1.RegisterWeightServiceServer(server, s)
	go server.Serve(l)
	t.Cleanup(func() {
		server.Stop()
		os.RemoveAll(dir)
	})
	return socket
}

func row(n, weight int) *farev1.DestinationWeights {
	return &farev1.DestinationWeights{
		Destination: fmt.Sprintf("10.255.0.%d/32", n), Sources: []string{"10.255.0.1/32"}, Reachable: true,
		Planes: []*farev1.PlaneWeight{{Plane: "p0", Weight: uint32(weight), InEffect: true}},
	}
}

func rows(r ...*farev1.DestinationWeights) []*farev1.DestinationWeights { return r }

// text describes an update: added and changed rows with their weight, removed rows.
func text(u *client.Update) string {
	var out []string
	for _, r := range u.Set {
		out = append(out, fmt.Sprintf("%s=%d", r.Destination, r.Planes[0].Weight))
	}
	for _, k := range u.Removed {
		out = append(out, "-"+k.Destination)
	}
	slices.Sort(out)
	return fmt.Sprintf("%s/%d %s", u.Instance, u.Revision, strings.Join(out, " "))
}

// follow watches until n updates have come, and returns their texts.
func follow(t *testing.T, socket string, n int, o client.Options) (updates []string, err error) {
	t.Helper()
	conn, err := client.Dial(socket)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	err = client.Watch(ctx, conn, o, func(u *client.Update) error {
		if updates = append(updates, text(u)); len(updates) == n {
			cancel()
		}
		return nil
	})
	return updates, err
}

// TestResume checks the position of each new stream, and that updates are whole and contain changes alone.
func TestResume(t *testing.T) {
	gone := []*farev1.WeightKey{{Destination: "10.255.0.2/32", Sources: []string{"10.255.0.1/32"}}}
	s := &script{streams: [][]*farev1.WatchWeightsResponse{
		{
			{Revision: 4, Instance: "a", Snapshot: true, Weights: rows(row(2, 1))},
			{Revision: 4, Instance: "a", Complete: true, Weights: rows(row(3, 1), row(4, 1))},
			{Revision: 5, Instance: "a", Complete: true, Weights: rows(row(3, 2))},
			{Revision: 6, Instance: "a", Removed: gone}, // the stream fails before the rest of revision 6
		},
		{
			{Revision: 6, Instance: "a", Removed: gone},
			{Revision: 6, Instance: "a", Complete: true, Weights: rows(row(4, 2))},
			{Revision: 7, Instance: "a", Complete: true, Weights: rows(row(4, 2))}, // as before
		},
		// The next run of the daemon; its first snapshot is interrupted.
		{{Revision: 1, Instance: "b", Snapshot: true, Weights: rows(row(9, 2))}},
		{
			{Revision: 1, Instance: "b", Snapshot: true, Weights: rows(row(3, 2))},
			{Revision: 1, Instance: "b", Complete: true, Weights: rows(row(5, 1))},
		},
	}}
	interrupted := 0
	got, err := follow(t, serve(t, s), 4, client.Options{Interrupted: func(err error) {
		if interrupted++; status.Code(err) != codes.Unavailable {
			t.Errorf("interrupted by %v", err)
		}
	}})
	if err != nil {
		t.Error(err)
	}
	want := []string{
		"a/4 10.255.0.2/32=1 10.255.0.3/32=1 10.255.0.4/32=1", "a/5 10.255.0.3/32=2", "a/6 -10.255.0.2/32 10.255.0.4/32=2", "b/1 -10.255.0.4/32 10.255.0.5/32=1",
	}
	if !slices.Equal(got, want) {
		t.Errorf("updates\n%s, want\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if want := []string{"/0", "a/5", "a/7", "a/7"}; !slices.Equal(s.requests, want) || interrupted != 3 {
		t.Errorf("requests %q after %d interruptions, want %q after 3", s.requests, interrupted, want)
	}
}

// TestEnds checks the errors that end a watch: one that another stream cannot remedy, and one of the caller.
func TestEnds(t *testing.T) {
	s := &script{err: status.Error(codes.InvalidArgument, "no such source")}
	if _, err := follow(t, serve(t, s), 1, client.Options{}); status.Code(errors.Unwrap(err)) != codes.InvalidArgument {
		t.Errorf("the watch ended with %v", err)
	}
	s = &script{streams: [][]*farev1.WatchWeightsResponse{{{Revision: 1, Instance: "a", Snapshot: true, Complete: true}}}}
	conn, err := client.Dial(serve(t, s))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	own := errors.New("enough")
	if err := client.Watch(t.Context(), conn, client.Options{}, func(*client.Update) error { return own }); !errors.Is(err, own) {
		t.Errorf("the watch ended with %v, want %v", err, own)
	}
}
