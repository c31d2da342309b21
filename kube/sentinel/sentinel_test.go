package sentinel

import (
	"context"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/dynamicpb"
	"google.golang.org/protobuf/types/known/emptypb"
	_ "google.golang.org/protobuf/types/known/timestamppb"

	"github.com/fared/fared/internal/testkit/testbed"
)

// published is the part of NVSentinel's health_event.proto that an event uses, as a descriptor.
const published = `
name: "health_event.proto" package: "datamodels" syntax: "proto3" dependency: "google/protobuf/timestamp.proto"
message_type { name: "HealthEvents"
  field { name: "version" number: 1 type: TYPE_UINT32 label: LABEL_OPTIONAL }
  field { name: "events" number: 2 type: TYPE_MESSAGE type_name: ".datamodels.HealthEvent" label: LABEL_REPEATED } }
message_type { name: "Entity"
  field { name: "entityType" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL }
  field { name: "entityValue" number: 2 type: TYPE_STRING label: LABEL_OPTIONAL } }
message_type { name: "HealthEvent"
  field { name: "version" number: 1 type: TYPE_UINT32 label: LABEL_OPTIONAL }
  field { name: "agent" number: 2 type: TYPE_STRING label: LABEL_OPTIONAL }
  field { name: "componentClass" number: 3 type: TYPE_STRING label: LABEL_OPTIONAL }
  field { name: "checkName" number: 4 type: TYPE_STRING label: LABEL_OPTIONAL }
  field { name: "isFatal" number: 5 type: TYPE_BOOL label: LABEL_OPTIONAL }
  field { name: "isHealthy" number: 6 type: TYPE_BOOL label: LABEL_OPTIONAL }
  field { name: "message" number: 7 type: TYPE_STRING label: LABEL_OPTIONAL }
  field { name: "recommendedAction" number: 8 type: TYPE_ENUM type_name: ".datamodels.RecommendedAction" label: LABEL_OPTIONAL }
  field { name: "errorCode" number: 9 type: TYPE_STRING label: LABEL_REPEATED }
  field { name: "entitiesImpacted" number: 10 type: TYPE_MESSAGE type_name: ".datamodels.Entity" label: LABEL_REPEATED }
  field { name: "generatedTimestamp" number: 12 type: TYPE_MESSAGE type_name: ".google.protobuf.Timestamp" label: LABEL_OPTIONAL }
  field { name: "nodeName" number: 13 type: TYPE_STRING label: LABEL_OPTIONAL } }
enum_type { name: "RecommendedAction" value { name: "NONE" number: 0 } value { name: "CONTACT_SUPPORT" number: 5 } }`

// healthEvents returns an empty HealthEvents of the published description.
func healthEvents(t *testing.T) protoreflect.Message {
	t.Helper()
	var file descriptorpb.FileDescriptorProto
	if err := prototext.Unmarshal([]byte(published), &file); err != nil {
		t.Fatal(err)
	}
	d, err := protodesc.NewFile(&file, protoregistry.GlobalFiles)
	if err != nil {
		t.Fatal(err)
	}
	return dynamicpb.NewMessage(d.Messages().ByName("HealthEvents"))
}

// expected are the events of TestSend.
const expected = `version: 1
	events { version: 1 agent: "fared" componentClass: "Network" checkName: "FaredPlane" message: "3.5 of 4" entitiesImpacted { entityType: "PLANE" entityValue: "p2" }
		generatedTimestamp { seconds: 9 nanos: 5 } nodeName: "n" }
	events { version: 1 agent: "fared" componentClass: "Network" checkName: "FaredGPU" isFatal: true recommendedAction: CONTACT_SUPPORT
		entitiesImpacted { entityType: "LOOPBACK" entityValue: "10.255.0.1/32" } generatedTimestamp { seconds: 9 nanos: 5 } nodeName: "n" }
	events { version: 1 agent: "fared" componentClass: "Network" checkName: "FaredGPU" isHealthy: true
		entitiesImpacted { entityType: "LOOPBACK" entityValue: "10.255.0.2/32" } generatedTimestamp { seconds: 9 nanos: 5 } nodeName: "n" }`

// TestSend checks that a platform connector receives what the description means, and that its refusal is an error.
func TestSend(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	received := make(chan []byte, 2)
	var refuse atomic.Bool
	testbed.Serve(t, socket, func(s grpc.ServiceRegistrar) {
		s.RegisterService(&grpc.ServiceDesc{ServiceName: "datamodels.PlatformConnector", HandlerType: (*any)(nil), Methods: []grpc.MethodDesc{{
			MethodName: "HealthEventOccurredV1",
			Handler: func(_ any, _ context.Context, decode func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
				m := new(emptypb.Empty) // keeps all fields as unknown ones
				if err := decode(m); err != nil {
					return nil, err
				}
				received <- m.ProtoReflect().GetUnknown()
				if refuse.Load() {
					return nil, status.Error(codes.InvalidArgument, "no")
				}
				return &emptypb.Empty{}, nil
			},
		}}}, nil)
	})
	c, err := Dial(socket)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	events := []Event{
		{Node: "n", Check: "FaredPlane", EntityType: "PLANE", EntityValue: "p2", Message: "3.5 of 4", Time: time.Unix(9, 5)},
		{Node: "n", Check: "FaredGPU", EntityType: "LOOPBACK", EntityValue: "10.255.0.1/32", Fatal: true, Time: time.Unix(9, 5)},
		{Node: "n", Check: "FaredGPU", EntityType: "LOOPBACK", EntityValue: "10.255.0.2/32", Healthy: true, Time: time.Unix(9, 5)},
	}
	if err := c.Send(context.Background(), events); err != nil {
		t.Fatal(err)
	}
	got := healthEvents(t).Interface()
	want := got.ProtoReflect().New().Interface()
	if err := proto.Unmarshal(<-received, got); err != nil {
		t.Fatal(err)
	}
	if err := prototext.Unmarshal([]byte(expected), want); err != nil {
		t.Fatal(err)
	}
	if !proto.Equal(got, want) {
		t.Errorf("received\n%v\nwant\n%v", got, want)
	}
	refuse.Store(true)
	if err := c.Send(context.Background(), events); status.Code(err) != codes.InvalidArgument {
		t.Error(err)
	}
}
