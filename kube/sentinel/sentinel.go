// Package sentinel sends health events to the platform connector of NVSentinel, as one of its health monitors does. The
// messages are encoded by the field numbers of data-models/protobufs/health_event.proto of github.com/NVIDIA/NVSentinel
// (package datamodels, commit 264bfab85e3c), which also names the service.
package sentinel

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/encoding/protowire"
)

// method is the call that takes datamodels.HealthEvents.
const method = "/datamodels.PlatformConnector/HealthEventOccurredV1"

// timeout limits a call.
const timeout = 4 * time.Second

// Event is a datamodels.HealthEvent of agent "fared" and class "Network". An unhealthy fatal one recommends to contact
// the support.
type Event struct {
	Node, Check, Message string
	// EntityType and EntityValue are the impacted entity.
	EntityType, EntityValue string
	Healthy, Fatal          bool
	Time                    time.Time
}

// contactSupport is datamodels.RecommendedAction CONTACT_SUPPORT.
const contactSupport = 5

// Encode returns a datamodels.HealthEvents.
func Encode(events []Event) (out []byte) {
	out = number(out, 1, 1) // version
	for i := range events {
		out = message(out, 2, events[i].encode())
	}
	return out
}

func (e *Event) encode() (out []byte) {
	out = number(out, 1, 1) // version
	out = text(out, 2, "fared")
	out = text(out, 3, "Network")
	out = text(out, 4, e.Check)
	out = number(out, 5, protowire.EncodeBool(e.Fatal))
	out = number(out, 6, protowire.EncodeBool(e.Healthy))
	out = text(out, 7, e.Message)
	if e.Fatal {
		out = number(out, 8, contactSupport)
	}
	out = message(out, 10, text(text(nil, 1, e.EntityType), 2, e.EntityValue))
	out = message(out, 12, number(number(nil, 1, uint64(e.Time.Unix())), 2, uint64(e.Time.Nanosecond())))
	return text(out, 13, e.Node)
}

func number(out []byte, field protowire.Number, v uint64) []byte {
	return protowire.AppendVarint(protowire.AppendTag(out, field, protowire.VarintType), v)
}

func message(out []byte, field protowire.Number, v []byte) []byte {
	return protowire.AppendBytes(protowire.AppendTag(out, field, protowire.BytesType), v)
}

func text(out []byte, field protowire.Number, v string) []byte { return message(out, field, []byte(v)) }

// raw is a codec of messages that are encoded already.
type raw struct{}

// Marshal implements encoding.Codec.
func (raw) Marshal(v any) ([]byte, error) { return *v.(*[]byte), nil }

// Unmarshal implements encoding.Codec.
func (raw) Unmarshal(data []byte, v any) error {
	*v.(*[]byte) = data
	return nil
}

// Name implements encoding.Codec: the server has protobuf's.
func (raw) Name() string { return "proto" }

// Client sends events.
type Client struct{ conn *grpc.ClientConn }

// Dial returns a client of a platform connector's socket, without waiting for it.
func Dial(socket string) (*Client, error) {
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, fmt.Errorf("NVSentinel's socket %s: %w", socket, err)
	}
	return &Client{conn}, nil
}

// Close ends the connection.
func (c *Client) Close() error { return c.conn.Close() }

// Send sends events in one call.
func (c *Client) Send(ctx context.Context, events []Event) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	in, out := Encode(events), []byte(nil)
	if err := c.conn.Invoke(ctx, method, &in, &out, grpc.ForceCodec(raw{})); err != nil {
		return fmt.Errorf("NVSentinel: %w", err)
	}
	return nil
}
