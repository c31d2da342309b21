package pods

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// Patience limits the time of an answer, in addition to the requested wait for weights.
const Patience = 2 * time.Second

// Agent is a client of AttachService that does not wait for an absent agent.
type Agent struct {
	farev1.AttachServiceClient
	conn *grpc.ClientConn
}

// Dial returns a client of the agent at a unix socket's path. The first call shows whether the agent answers.
func Dial(socket string) (*Agent, error) {
	retry := backoff.DefaultConfig
	retry.BaseDelay, retry.MaxDelay = 50*time.Millisecond, time.Second
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: retry, MinConnectTimeout: Patience}))
	if err != nil {
		return nil, fmt.Errorf("the agent's socket %s: %w", socket, err)
	}
	return &Agent{farev1.NewAttachServiceClient(conn), conn}, nil
}

// Close closes the connection.
func (a *Agent) Close() error { return a.conn.Close() }

// Attach attaches, and waits for weights.
func (a *Agent) Attach(ctx context.Context, req *farev1.AttachRequest, wait time.Duration) (*farev1.Attachment, error) {
	ctx, cancel := context.WithTimeout(ctx, wait+Patience)
	defer cancel()
	req.WaitNs = uint64(wait)
	resp, err := a.AttachServiceClient.Attach(ctx, req)
	return resp.GetAttachment(), err
}

// Detach detaches.
func (a *Agent) Detach(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(ctx, Patience)
	defer cancel()
	_, err := a.AttachServiceClient.Detach(ctx, &farev1.DetachRequest{Id: id})
	return err
}

// List returns all attachments.
func (a *Agent) List(ctx context.Context) ([]*farev1.Attachment, error) {
	ctx, cancel := context.WithTimeout(ctx, Patience)
	defer cancel()
	resp, err := a.ListAttachments(ctx, &farev1.ListAttachmentsRequest{})
	return resp.GetAttachments(), err
}

// Absent reports whether an error means that no agent serves attachments now: it is down, hangs, or is of a version
// without them. Other errors are refusals, which later attempts would repeat.
func Absent(err error) bool {
	switch status.Code(err) {
	case codes.Unavailable, codes.DeadlineExceeded, codes.Canceled, codes.Aborted, codes.Internal, codes.Unknown, codes.Unimplemented:
		return true
	}
	return false
}

// Reason returns the text of an RPC's error.
func Reason(err error) string {
	if s, ok := status.FromError(err); ok {
		return s.Message()
	}
	return err.Error()
}
