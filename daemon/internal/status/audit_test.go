package status

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// lines is a log that a test can read.
type lines struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(b)
}

func (l *lines) take() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	defer l.b.Reset()
	return strings.FieldsFunc(l.b.String(), func(r rune) bool { return r == '\n' })
}

// TestRefusedCallsAreRecorded makes drain, undrain and reload fail over every transport, for lack of the right or for
// their target: each is exactly one event and one line of the log, with who, what, why and the result. Calls that only
// read are not recorded, also when they fail.
func TestRefusedCallsAreRecorded(t *testing.T) {
	var log lines
	events := make(chan Event, 100)
	var hours atomic.Int64
	_, clients := matrixClients(t, func(c *ServiceConfig) {
		refuse := &Problem{Kind: Refused, Subject: "it", Remedy: "do otherwise", Err: fmt.Errorf("no")}
		c.Drain = func(context.Context, DrainRequest) (DrainTarget, []string, error) { return DrainTarget{}, nil, refuse }
		c.ClearSession = func(context.Context, string) error { return refuse }
		c.Reload = func(context.Context, bool) ([]string, error) { return nil, refuse }
		c.Record = func(e Event) { events <- e }
		c.Now = func() time.Time { return time.Unix(3600*hours.Load(), 0) }
		c.Log = slog.New(slog.NewTextHandler(&log, nil))
	})
	p0 := &farev1.DrainTarget{Target: &farev1.DrainTarget_Plane{Plane: "p0"}}
	for _, c := range clients {
		hours.Add(1) // all connections over unix sockets are those of one user, with one budget of records
		fabric := farev1.NewFabricServiceClient(c.conn)
		for _, call := range []struct {
			name, subject string
			do            func() error
		}{
			{"drain", "plane p0", func() error {
				_, err := fabric.Drain(t.Context(), &farev1.DrainRequest{Target: p0, Reason: "new optics"})
				return err
			}},
			{"undrain", "plane p0", func() error {
				_, err := fabric.Undrain(t.Context(), &farev1.UndrainRequest{Target: p0})
				return err
			}},
			{"clearsession", "session p0/p0a", func() error {
				_, err := fabric.ClearSession(t.Context(), &farev1.ClearSessionRequest{Session: "p0/p0a"})
				return err
			}},
			{"reload", "configuration", func() error {
				_, err := fabric.Reload(t.Context(), &farev1.ReloadRequest{})
				return err
			}},
			{"", "", func() error {
				_, err := fabric.GetStatus(t.Context(), &farev1.GetStatusRequest{})
				if err == nil {
					_, err = farev1.NewWeightServiceClient(c.conn).GetWeights(t.Context(), &farev1.GetWeightsRequest{Destination: "no address"})
				}
				return err
			}},
		} {
			err := call.do()
			logged := log.take()
			if call.name == "" {
				if err == nil || len(events) != 0 || len(logged) != 0 {
					t.Errorf("a read over %s: %v, %d events, log %q", c.name, err, len(events), logged)
				}
				continue
			}
			if len(events) != 1 || len(logged) != 1 {
				t.Fatalf("%s over %s: %d events, log %q; want one each", call.name, c.name, len(events), logged)
			}
			e := <-events
			code := codes.FailedPrecondition
			if !c.operate {
				code = codes.PermissionDenied
			}
			reason := ""
			if call.name == "drain" {
				reason = `, reason "new optics"`
			}
			want := regexp.MustCompile(fmt.Sprintf(`^%s by %s%s: %s: `, call.name, c.who, reason, code))
			if e.Kind != EventRefused || e.Kind.String() != "refused" || e.Subject != call.subject || !want.MatchString(e.Detail) || e.Time.IsZero() {
				t.Errorf("%s over %s: event %+v, want subject %q and %s", call.name, c.name, e, call.subject, want)
			}
			if !strings.Contains(logged[0], "level=WARN msg=refused subject=") || !strings.Contains(logged[0], strings.ReplaceAll(e.Detail, `"`, `\"`)) {
				t.Errorf("%s over %s: log %s, event %s", call.name, c.name, logged[0], e.Detail)
			}
			if grpcstatus.Code(err) != code {
				t.Errorf("%s over %s: %v, want %v", call.name, c.name, err, code)
			}
		}
	}
}

// TestRefusedCallsAreBounded checks that a client without the right cannot fill the events: neither by their number nor
// by their size, nor forge lines.
func TestRefusedCallsAreBounded(t *testing.T) {
	events := make(chan Event, 1000)
	_, clients := matrixClients(t, func(c *ServiceConfig) { c.Record = func(e Event) { events <- e } })
	fabric := farev1.NewFabricServiceClient(clients[1].conn)
	evil := strings.Repeat("x", 1<<16) + "\nforged\x1b[2J"
	for i := range 100 {
		target := &farev1.DrainTarget{Target: &farev1.DrainTarget_SubPort{SubPort: evil[len(evil)-20+i%10:] + evil}}
		if _, err := fabric.Drain(t.Context(), &farev1.DrainRequest{Target: target, Reason: evil}); grpcstatus.Code(err) != codes.PermissionDenied {
			t.Fatal(err)
		}
	}
	if n := len(events); n == 0 || n > 10 {
		t.Errorf("100 refused calls of a client are %d events, want 1 to 10", n)
	}
	close(events)
	for e := range events {
		if len(e.Subject)+len(e.Detail) > 4*maxAudited || strings.ContainsAny(e.Subject+e.Detail, "\n\x1b") {
			t.Errorf("event %q %q", e.Subject, e.Detail)
		}
	}
}
