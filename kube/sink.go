package kube

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/fared/fared/kube/apiserver"
	"github.com/fared/fared/kube/pacer"
)

// sink writes objects to one place, paced, one after the other.
type sink struct {
	name  string
	write func(ctx context.Context, key, body string) error
	log   *slog.Logger
	now   func() time.Time
	wake  chan struct{}

	mu      sync.Mutex // guards the fields below
	pacer   *pacer.Pacer
	results [pacer.Failed + 1]uint64
	success time.Time // the last one
}

func newSink(name string, log *slog.Logger, now func() time.Time, write func(ctx context.Context, key, body string) error) *sink {
	return &sink{name: name, write: write, log: log, now: now, wake: make(chan struct{}, 1), pacer: pacer.New(now())}
}

// want sets an object.
func (s *sink) want(key string, o pacer.Object) {
	s.change(func(now time.Time) { s.pacer.Want(now, key, o) })
}

// refresh writes objects that another program may have changed; all without keys.
func (s *sink) refresh(keys ...string) {
	s.change(func(now time.Time) { s.pacer.Refresh(now, keys...) })
}

func (s *sink) change(change func(now time.Time)) {
	s.mu.Lock()
	change(s.now())
	s.mu.Unlock()
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// run writes until ctx ends.
func (s *sink) run(ctx context.Context) {
	failed := map[string]string{} // by key
	for {
		s.mu.Lock()
		key, o, wake, ok := s.pacer.Next(s.now())
		s.mu.Unlock()
		if !ok {
			if !s.wait(ctx, wake) {
				return
			}
			continue
		}
		err := s.write(ctx, key, o.Body)
		if ctx.Err() != nil {
			return
		}
		s.report(failed, key, err)
		s.done(err)
	}
}

// done records the end of a write.
func (s *sink) done(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now, r := s.now(), result(err)
	s.pacer.Done(now, r, apiserver.Wait(err, pacer.RetryLast))
	if s.results[r]++; r == pacer.Written {
		s.success = now
	}
}

// result returns the result of a write.
func result(err error) pacer.Result {
	switch {
	case err == nil:
		return pacer.Written
	case apiserver.Refused(err) || status.Code(err) == codes.Unavailable:
		return pacer.Refused
	}
	return pacer.Failed
}

// report logs a failure that differs from the last one of the key, and the end of failures.
func (s *sink) report(failed map[string]string, key string, err error) {
	switch {
	case err == nil && failed[key] != "":
		s.log.Info("written", "to", s.name, "object", key)
		delete(failed, key)
	case err != nil && failed[key] != err.Error():
		s.log.Warn("not written, and repeated", "to", s.name, "object", key, "error", err)
		failed[key] = err.Error()
	}
}

// wait waits until a time, unless that is zero, or until an object has changed; false if ctx has ended.
func (s *sink) wait(ctx context.Context, until time.Time) bool {
	var timer <-chan time.Time
	if !until.IsZero() {
		t := time.NewTimer(until.Sub(s.now()))
		defer t.Stop()
		timer = t.C
	}
	select {
	case <-ctx.Done():
		return false
	case <-s.wake:
	case <-timer:
	}
	return true
}
