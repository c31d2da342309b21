package report

import (
	"context"
	"strings"

	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// mark begins the reason of the fleet's drains at a daemon. Drains with other reasons are those of operators.
const mark = "fleet: "

// maxReason is the daemon's limit of a reason in bytes.
const maxReason = 256

// reconcile drains the sub-ports of the fleet's drains, and ends those that are no longer wanted. It is repeated with
// every read, so a failure needs no other handling.
func (r *reporter) reconcile(ctx context.Context, api farev1.FabricServiceClient, present []*farev1.DrainStatus) {
	r.mu.Lock()
	wanted := r.wanted
	r.mu.Unlock()
	if wanted == nil {
		return
	}
	open := map[string]string{}
	for _, d := range wanted.Drains {
		open[d.Device] = mark + d.Reason
	}
	for _, d := range present {
		device := d.Target.GetSubPort()
		if device == "" {
			continue
		}
		_, keep := open[device]
		delete(open, device)
		if keep || !strings.HasPrefix(d.Reason, mark) || d.Stage == "undraining" {
			continue
		}
		if _, err := api.Undrain(ctx, &farev1.UndrainRequest{Target: d.Target}); err != nil {
			r.Log.Warn("the end of a drain failed", "sub_port", device, "error", status.Convert(err).Message())
		}
	}
	for device, reason := range open {
		req := &farev1.DrainRequest{Target: &farev1.DrainTarget{Target: &farev1.DrainTarget_SubPort{SubPort: device}}, Reason: clip(reason)}
		if _, err := api.Drain(ctx, req); err != nil {
			r.Log.Warn("a drain of the fleet failed", "sub_port", device, "error", status.Convert(err).Message())
		}
	}
}

// clip makes a reason valid for the daemon: printable text of limited length.
func clip(reason string) string {
	reason = strings.Map(func(c rune) rune {
		if c < ' ' || c == 0x7f {
			return ' '
		}
		return c
	}, strings.ToValidUTF8(reason, "?"))
	if len(reason) > maxReason {
		reason = strings.ToValidUTF8(reason[:maxReason], "")
	}
	return reason
}
