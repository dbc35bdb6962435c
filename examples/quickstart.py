"""Fed-LAMB on handwritten digits: 20 clients with two kinds of digits or so each."""

import fedlamb as fl

data = fl.digits()
task = fl.Task(fl.mlp(64, [64], 10), train=data.train, test=data.test)
clients = fl.shards(data.train[1], n=20, per_client=2)

method = fl.FedLAMB(lr=0.03, schedule=fl.StepDecay(after=(40,)))  # then a tenth of the rate
run = fl.fit(method, task, clients=clients, fraction=0.5, rounds=60, batch_size=16)
for r in run:
    print(f"round {r.number:2}: {r.metrics['test_accuracy']:.1%}, {r.uplink_bytes} bytes up")

model = run.model().eval()  # an ordinary nn.Module with the trained parameters
print(model)
