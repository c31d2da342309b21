package contract

import (
	"testing"

	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// TestReplacedStreamCommitsNothing checks that pending operations of a replaced stream are neither committed nor
// acknowledged.
func TestReplacedStreamCommitsNothing(t *testing.T) {
	s := New(Config{Forwarder: newStrict(t)})
	greet(t, s, forwarding())
	older, newer := &session{}, &session{}
	down := func() []*farev1.Operation {
		return []*farev1.Operation{{Id: 1, Op: &farev1.Operation_SubPort{SubPort: &farev1.SubPortState{Device: "a"}}}}
	}
	s.current = newer
	before := s.state.Snapshot()
	if outcomes, _ := s.take(older, down()); len(outcomes) > 0 || !proto.Equal(before, s.state.Snapshot()) {
		t.Errorf("the older stream committed: %+v", outcomes)
	}
	if outcomes, _ := s.take(newer, down()); len(outcomes) != 1 || !outcomes[0].changed {
		t.Errorf("the newer stream did not commit: %+v", outcomes)
	}
}
