// Calls libcni as a container runtime does, one verb a run: the tests' second opinion on the plugin.
//
//	driver VERB CONFLIST CACHE CONTAINER NETNS [valid container ...]
//
// Prints the result of ADD, of VERSION the versions that libcni takes, as JSON; an error as {"code", "msg", "details"}
// with exit code 1. CNI_PATH, CNI_ARGS and CAP_ARGS are taken from the environment.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"
)

func main() {
	if len(os.Args) < 6 {
		fmt.Fprintln(os.Stderr, "usage: driver VERB CONFLIST CACHE CONTAINER NETNS [valid container ...]")
		os.Exit(2)
	}
	result, err := run(os.Args[1], os.Args[2], os.Args[3], os.Args[4], os.Args[5], os.Args[6:])
	if err != nil {
		answer := map[string]any{"code": 0, "msg": err.Error(), "details": ""}
		var plugin *types.Error
		if errors.As(err, &plugin) {
			answer = map[string]any{"code": plugin.Code, "msg": plugin.Msg, "details": plugin.Details}
		}
		_ = json.NewEncoder(os.Stdout).Encode(answer)
		os.Exit(1)
	}
	if result != nil {
		_ = json.NewEncoder(os.Stdout).Encode(result)
	}
}

func run(verb, conflist, cache, container, netns string, valid []string) (any, error) {
	list, err := libcni.ConfListFromFile(conflist)
	if err != nil {
		return nil, err
	}
	cni := libcni.NewCNIConfigWithCacheDir(filepath.SplitList(os.Getenv("CNI_PATH")), cache, nil)
	runtime := &libcni.RuntimeConf{ContainerID: container, NetNS: netns, IfName: "eth0"}
	for pair := range strings.SplitSeq(os.Getenv("CNI_ARGS"), ";") {
		if key, value, ok := strings.Cut(pair, "="); ok {
			runtime.Args = append(runtime.Args, [2]string{key, value})
		}
	}
	if text := os.Getenv("CAP_ARGS"); text != "" {
		if err := json.Unmarshal([]byte(text), &runtime.CapabilityArgs); err != nil {
			return nil, err
		}
	}
	ctx := context.Background()
	switch verb {
	case "ADD":
		return cni.AddNetworkList(ctx, list, runtime)
	case "DEL":
		return nil, cni.DelNetworkList(ctx, list, runtime)
	case "CHECK":
		return nil, cni.CheckNetworkList(ctx, list, runtime)
	case "STATUS":
		return nil, cni.GetStatusNetworkList(ctx, list)
	case "GC":
		attachments := []types.GCAttachment{}
		for _, id := range valid {
			attachments = append(attachments, types.GCAttachment{ContainerID: id, IfName: "eth0"})
		}
		return nil, cni.GCNetworkList(ctx, list, &libcni.GCArgs{ValidAttachments: attachments})
	case "VERSION":
		info, err := cni.GetVersionInfo(ctx, list.Plugins[0].Network.Type)
		if err != nil {
			return nil, err
		}
		return map[string]any{"cniVersion": list.CNIVersion, "supportedVersions": info.SupportedVersions()}, nil
	default:
		return nil, fmt.Errorf("no verb is called %s", verb)
	}
}
