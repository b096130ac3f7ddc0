# First process of a node, in its own network, mount, UTS and PID namespaces.
# Arguments: node name, its address, its state folder, the instance's state folder, folder of binaries, folder of
# another containerd (or of the binaries again), then images.
set -eu
node=$1 address=$2 state=$3 instance=$4 binaries=$5 runtime=$6
shift 6
fail() {
    echo "$*" > "$state/failed"
    exit 1
}
trap '[ -e "$state/ready" ] || echo "line $LINENO" >> "$state/failed"' EXIT
hostname "$node"
mount -t tmpfs tmpfs /run
mkdir -p /run/netns /run/lock /run/cgroups
# A sysfs of this network namespace, with the machine's cgroups in it.
mount --rbind /sys/fs/cgroup /run/cgroups
umount -R /sys
mount -t sysfs sysfs /sys
mount --rbind /run/cgroups /sys/fs/cgroup
umount -R /run/cgroups
rmdir /run/cgroups
mount -t bpf bpf /sys/fs/bpf
while read -r path; do
    mkdir -p "$state/private$path"
    mount --bind "$state/private$path" "$path"
done < "$state/private-paths"
mkdir -p /etc/cni/net.d /opt/cni/bin
cp /usr/lib/cni/loopback /opt/cni/bin/
# Last: earlier, unmounting one copy of the cgroups would unmount both.
mount --make-rshared /
export PATH="$runtime:$binaries:$PATH"
cd /

# Started again when it ends, as a service manager would; what it runs goes on without it.
(
    while :; do
        containerd --config "$state/containerd.toml" >> "$state/log/containerd.log" 2>&1 || true
        sleep 0.5
    done
) &
tries=0
until ctr version > /dev/null 2>&1; do
    tries=$((tries + 1))
    [ "$tries" -lt 200 ] || fail "containerd does not answer"
    sleep 0.1
done
for image in "$@"; do
    ctr --namespace k8s.io images import "$image" >> "$state/log/import.log" 2>&1 || fail "importing $image"
done
until [ -e "$instance/api-ready" ]; do sleep 0.1; done
"$binaries/kubelet" --config "$state/kubelet.yaml" --kubeconfig "$instance/$node.conf" \
    --hostname-override "$node" --node-ip "$address" > "$state/log/kubelet.log" 2>&1 &
touch "$state/ready"
# Orphans of the node become this process's children: collect them for ever.
set +e
while :; do
    sleep 3600 &
    wait $!
done
