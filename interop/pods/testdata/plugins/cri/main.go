// Cri asks a container runtime to run and to end pods, as kubelet does.
//
//	cri SOCKET run FILE        runs the pod of a file, and prints the ids of its sandbox and its container
//	cri SOCKET state CONTAINER prints CONTAINER_RUNNING or another state, and the exit status
//	cri SOCKET end SANDBOX     stops and removes a pod
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// pod is the contents of a file.
type pod struct {
	Sandbox   cri.PodSandboxConfig
	Container cri.ContainerConfig
}

func main() {
	if len(os.Args) != 4 {
		fmt.Fprintln(os.Stderr, "usage: cri SOCKET run FILE | state CONTAINER | end SANDBOX")
		os.Exit(2)
	}
	if err := ask(os.Args[1], os.Args[2], os.Args[3]); err != nil {
		fmt.Fprintln(os.Stderr, "cri:", err)
		os.Exit(1)
	}
}

func ask(socket, verb, what string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer conn.Close()
	runtime := cri.NewRuntimeServiceClient(conn)
	switch verb {
	case "run":
		return run(ctx, runtime, what)
	case "state":
		r, err := runtime.ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: what})
		if err == nil {
			fmt.Println(r.Status.State, r.Status.ExitCode)
		}
		return err
	case "end":
		_, err := runtime.StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: what})
		if err == nil {
			_, err = runtime.RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: what})
		}
		return err
	}
	return errors.New("no such verb: " + verb)
}

func run(ctx context.Context, runtime cri.RuntimeServiceClient, file string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	var p pod
	if err := json.Unmarshal(text, &p); err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	box, err := runtime.RunPodSandbox(ctx, &cri.RunPodSandboxRequest{Config: &p.Sandbox})
	if err != nil {
		return err
	}
	c, err := runtime.CreateContainer(ctx, &cri.CreateContainerRequest{PodSandboxId: box.PodSandboxId, Config: &p.Container, SandboxConfig: &p.Sandbox})
	if err == nil {
		_, err = runtime.StartContainer(ctx, &cri.StartContainerRequest{ContainerId: c.ContainerId})
	}
	if err != nil {
		return fmt.Errorf("sandbox %s: %w", box.PodSandboxId, err)
	}
	fmt.Println(box.PodSandboxId, c.ContainerId)
	return nil
}
