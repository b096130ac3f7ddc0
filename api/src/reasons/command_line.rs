//! Reasons that `kubectl thuban` itself gives for what it finds.

super::reasons! {
    "NoOperator", "kubectl thuban status":
        "there is no Deployment of the operator in the namespace of Thuban"
        => "install Thuban, or name its namespace by --system-namespace";
    "OperatorNotReady", "kubectl thuban status":
        "some replicas of the operator are not ready"
        => "look at the pods with the label app.kubernetes.io/name=thuban-operator, and their logs";
    "NoLeader", "kubectl thuban status":
        "no operator leads: nothing that changes reaches droplets"
        => "look at the logs of the operator's pods";
    "LeaseOld", "kubectl thuban status":
        "the leading operator has not renewed its Lease for long, by the clock of this machine"
        => "compare this machine's clock; if it is right, look at the logs of the operator's pods";
    "NotJudged", "kubectl thuban status":
        "the operator has said nothing about the object yet"
        => "wait some seconds; if it stays, look whether the operator leads";
    "RolesNotWorking", "kubectl thuban status":
        "some dividers of the VPC, or bouncers of the network, do not work"
        => "look at kubectl get bouncers,dividers";

    "NoAnswer", "kubectl thuban why":
        "the operator did not answer in time: none leads, or it is older than the plugin"
        => "look whether an operator leads: kubectl thuban status";

    "VersionsDiffer", "kubectl thuban check":
        "transitd on some droplets is of another version than the operator"
        => "finish the upgrade: kubectl rollout status -n thuban-system daemonset/transitd";
    "PluginDiffers", "kubectl thuban check":
        "the plugin is of another version than the operator, and may read objects wrongly"
        => "install the plugin of the operator's version";
    "VersionUnknown", "kubectl thuban check":
        "the Lease of the operator has no version: the operator is older, or none has led yet"
        => "look whether an operator leads: kubectl thuban status";
    "NodeWithoutDroplet", "kubectl thuban check":
        "the Node has no Droplet: pods there get no network of Thuban"
        => "look at the pod of transitd on the node, and at the nodeSelector of the DaemonSet";
    "DropletWithoutNode", "kubectl thuban check":
        "the Droplet has no Node"
        => "wait for the garbage collector, or delete the Droplet";
    "RangeHasNode", "kubectl thuban check":
        "a range of a VPC or network has the address of a node: its pods and the node can't tell who is meant"
        => "choose another range";
    "RangeTouchesPodRange", "kubectl thuban check":
        "a range of a VPC or network touches the range for pods of a node, which clouds and other software may route"
        => "choose another range, or make sure that nothing routes spec.podCIDRs of Nodes";
    "RangeTouchesServices", "kubectl thuban check":
        "a range of a VPC or network touches a range of Services: its pods reach no Service there"
        => "choose another range";
    "OtherNetworkPlugin", "kubectl thuban check":
        "a DaemonSet mounts the folder of network plugins' configuration: it may replace Thuban's"
        => "remove the other network plugin, or make sure that it only adds to Thuban's configuration";
    "KubeProxy", "kubectl thuban check":
        "kube-proxy runs: its rules and Thuban's both translate Services"
        => "delete the DaemonSet, and run kube-proxy --cleanup on each node or boot it";
}
