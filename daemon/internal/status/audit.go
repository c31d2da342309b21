package status

import (
	"context"
	"fmt"
	"path"
	"strings"
	"unicode"
	"unicode/utf8"

	grpcstatus "google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/grpcserve"
)

// maxAudited is the greatest length of a client's text in an event of a refused call, bytes. Requests are recorded
// before they are validated.
const maxAudited = 256

// audit records a call that needs the right to operate and failed: a log line and an event. The functions that carry
// out such a call record those that succeed.
func (s *Service) audit(ctx context.Context, method string, req any, err error) {
	if err == nil || methods[method] == accessRead {
		return
	}
	caller := grpcserve.CallerOf(ctx)
	missed, ok := s.refusals.Record(caller.Client(), s.c.Now())
	if !ok {
		return
	}
	subject, reason := audited(req)
	detail := strings.ToLower(path.Base(method)) + " by " + caller.String()
	if reason != "" {
		detail += fmt.Sprintf(", reason %q", reason)
	}
	detail += fmt.Sprintf(": %s: %s", grpcstatus.Code(err), printable(grpcstatus.Convert(err).Message()))
	if missed > 0 {
		detail += fmt.Sprintf("; %d more calls of this client were refused before", missed)
	}
	s.c.Log.Warn(EventRefused.String(), "subject", subject, "detail", detail)
	if s.c.Record == nil {
		return
	}
	s.c.Record(Event{Time: s.c.Now(), Kind: EventRefused, Subject: subject, Detail: detail})
}

// audited returns the target and the reason of a request.
func audited(req any) (subject, reason string) {
	var t *farev1.DrainTarget
	switch req := req.(type) {
	case *farev1.DrainRequest:
		t, reason = req.GetTarget(), printable(req.GetReason())
	case *farev1.UndrainRequest:
		t = req.GetTarget()
	case *farev1.ClearSessionRequest:
		return printable("session " + req.GetSession()), ""
	case *farev1.ReloadRequest:
		return "configuration", ""
	}
	switch {
	case t.GetPlane() != "":
		subject = "plane " + t.GetPlane()
	case t.GetLeaf() != "":
		subject = "leaf " + t.GetLeaf()
	case t.GetSubPort() != "":
		subject = "sub-port " + t.GetSubPort()
	}
	return printable(subject), reason
}

// printable returns at most maxAudited bytes of a client's text, with a replacement for runes that could change a
// terminal or forge a line.
func printable(text string) string {
	if len(text) > maxAudited {
		text = text[:maxAudited] + "..."
	}
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return utf8.RuneError
	}, text)
}
